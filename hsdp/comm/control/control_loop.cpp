#include "hsdp/comm/control/control_loop.h"

#include <pthread.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <exception>
#include <future>
#include <utility>

#include "hsdp/comm/descriptor_limit.h"
#include "hsdp/comm/rendezvous/tcp_rendezvous.h"
#include "hsdp/device/all_signals_blocked.h"

namespace hsdp::comm {
namespace asio = boost::asio;

ControlLoop::ControlLoop(std::shared_ptr<ControlState> state, JoinFrame own, Millis timeout)
    : state_(std::move(state)),
      own_(std::move(own)),
      timeout_(timeout),
      work_(asio::make_work_guard(io_)),
      tick_timer_(io_),
      stop_timer_(io_),
      member_(state_, own_.rank, own_.size, timeout_,
              {[this](FrameType type, const std::string& body) { to_hub(type, body); },
               [this] { state_->run_callbacks(); },
               [this](const WorldEnd& world_end) {
                 if (relay_) relay_->end(world_end);
               }}) {}

ControlLoop::~ControlLoop() { stop(); }

void ControlLoop::start_as_hub(int listener, const std::string& secret,
                               const std::string& welcome_secret) {
  hub_ = std::make_unique<ControlHub>(
      state_->clock(),
      ControlHub::Options{own_, welcome_secret, timeout_, [this] { return trouble_at_door(); }},
      [this](FrameType type, std::string_view body) { member_.frame(type, body); });
  door_is_tcp_ = !secret.empty();
  if (listener >= 0) {
    constexpr Millis kProofDeadline{5'000};
    JoinListener::Options options{secret, std::min(kProofDeadline, timeout_), own_.size - 1};
    JoinListener::Handlers handlers;
    handlers.on_join = [this](const std::shared_ptr<ControlLink>& link, const JoinFrame& join) {
      admit(link, join);
    };
    handlers.on_limit = [this] { state_->note_descriptor_limit(); };
    listener_ =
        std::make_unique<JoinListener>(io_, listener, std::move(options), std::move(handlers));
  } else {
    hub_->welcome_if_complete();
  }
  start_thread();
}

void ControlLoop::admit(const std::shared_ptr<ControlLink>& link, const JoinFrame& join) {
  link->set_handlers({});
  if (!hub_->admits(join)) return hub_->join(link, join);
  const int rank = join.rank;
  link->set_max_body_bytes(kMaxFrameBytes);
  link->bound_dead_link(timeout_);
  link->count_in(state_->traffic(), rank);
  ControlLink::Handlers handlers;
  handlers.on_frame = [this, rank, weak = std::weak_ptr(link)](FrameType type,
                                                               std::string_view body) {
    hub_->handle(rank, type, body);
    if (type != FrameType::kMoved) return;
    watches_.erase(rank);
    if (const auto moved = weak.lock()) moved->set_handlers({});
  };
  handlers.on_closed = [this, rank, is_unix = link->is_unix()](const std::string& reason) {
    is_unix ? hub_->process_ended(rank) : hub_->link_broke(rank, reason);
  };
  handlers.on_progress = [this, rank] { hub_->heard(rank); };
  link->set_handlers(std::move(handlers));
  hub_->join(link, join);
  if (const auto pid = link->peer_pid(); pid && !hub_->ended()) {
    watches_.erase(rank);
    watches_.try_emplace(rank, io_, *pid, [this, rank] { hub_->process_ended(rank); });
  }
}

std::string ControlLoop::trouble_at_door() const {
  if (state_->at_descriptor_limit()) return descriptor_limit_text();
  std::string callers;
  if (listener_) {
    for (const std::string& caller : listener_->unproven()) {
      callers += (callers.empty() ? "" : ", ") + caller;
    }
  }
  if (!callers.empty()) {
    return "callers from " + callers + " did not prove this job's secret: compare HSDP_SECRET";
  }
  if (!hub_->other_job().empty()) {
    return "ranks of job '" + hub_->other_job() +
           "' called here: give each job and step its own HSDP_PORT";
  }
  if (door_is_tcp_ && is_loopback(own_.address)) {
    return "set HSDP_ADDR, if they are on other hosts, to an address that these reach: " +
           own_.address + " is a loopback; check that all ranks were started and still run";
  }
  return "";
}

void ControlLoop::start_as_rank(UniqueFd socket) {
  link_ = std::make_shared<ControlLink>(io_, std::move(socket));
  link_->bound_dead_link(timeout_);
  link_->count_in(state_->traffic(), 0);
  member_.heard();
  ControlLink::Handlers handlers;
  handlers.on_frame = [this](FrameType type, std::string_view body) { from_parent(type, body); };
  link_->start(std::move(handlers), kMaxFrameBytes);
  watch_parent(*link_);
  link_->send(make_frame(FrameType::kJoin, own_.encode()));
  start_thread();
}

void ControlLoop::watch_parent(ControlLink& link) {
  parent_watch_.reset();
  if (const auto pid = link.peer_pid()) {
    parent_watch_ =
        std::make_unique<ProcessWatch>(io_, *pid, [this] { parent_closed("its process ended"); });
  }
  ControlLink::Handlers handlers;
  handlers.on_frame = [this](FrameType type, std::string_view body) { from_parent(type, body); };
  handlers.on_closed = [this, is_unix = link.is_unix()](const std::string& reason) {
    parent_closed(is_unix ? "its process ended" : "its connection ended: " + reason);
  };
  handlers.on_progress = [this] { member_.heard(); };
  link.set_handlers(std::move(handlers));
}

void ControlLoop::from_parent(FrameType type, std::string_view body) {
  member_.heard();
  relay_ ? relay_->handle_from_parent(type, body) : member_.frame(type, body);
}

void ControlLoop::lead_children(UniqueFd listener, std::vector<int> children) {
  asio::post(io_, [this, listener = std::make_shared<UniqueFd>(std::move(listener)),
                   children = std::move(children)] {
    relay_ = std::make_unique<ControlRelay>(
        own_.rank, own_.size,
        ControlRelay::Handlers{
            [this](FrameType type, const std::string& body) {
              link_->send(make_frame(type, body));
            },
            [this](FrameType type, std::string_view body) { member_.frame(type, body); }});
    children_door_ = std::move(*listener);
    JoinListener::Options options{"", timeout_, static_cast<int>(children.size())};
    JoinListener::Handlers handlers;
    handlers.on_join = [this, children](const std::shared_ptr<ControlLink>& link,
                                        const JoinFrame& join) {
      take_child(link, join, children);
    };
    handlers.on_limit = [this] { state_->note_descriptor_limit(); };
    listener_ = std::make_unique<JoinListener>(io_, children_door_.get(), std::move(options),
                                               std::move(handlers));
  });
}

void ControlLoop::take_child(const std::shared_ptr<ControlLink>& link, const JoinFrame& join,
                             const std::vector<int>& expected) {
  const int child = join.rank;
  const bool fits = join.version == own_.version && join.job == own_.job &&
                    std::ranges::binary_search(expected, child) && !watches_.contains(child);
  if (!fits) return link->close();
  link->set_max_body_bytes(kMaxFrameBytes);
  link->count_in(state_->traffic(), child);
  ControlLink::Handlers handlers;
  handlers.on_frame = [this, child](FrameType type, std::string_view body) {
    relay_->handle(child, type, body);
  };
  handlers.on_closed = [this, child](const std::string&) { relay_->child_ended(child); };
  link->set_handlers(std::move(handlers));
  relay_->add(child, link);
  link->send(make_frame(FrameType::kBeat, BeatFrame{}.encode()));  // accepted
  if (const auto pid = link->peer_pid()) {
    watches_.try_emplace(child, io_, *pid, [this, child] { relay_->child_ended(child); });
  }
}

bool ControlLoop::follow_parent(UniqueFd socket, int parent,
                                std::chrono::steady_clock::time_point end) {
  auto taken = std::make_shared<std::promise<bool>>();
  auto told = std::make_shared<bool>(false);
  std::future<bool> is_taken = taken->get_future();
  const auto tell = [taken, told](bool yes) {
    if (!std::exchange(*told, true)) taken->set_value(yes);
  };
  asio::post(io_, [this, tell, parent, socket = std::make_shared<UniqueFd>(std::move(socket))] {
    next_link_ = std::make_shared<ControlLink>(io_, std::move(*socket));
    next_link_->count_in(state_->traffic(), parent);
    ControlLink::Handlers handlers;
    handlers.on_frame = [this, tell](FrameType type, std::string_view body) {
      tell(true);
      // Rank 0 may be unable to report it.
      if (type == FrameType::kFail) from_parent(type, body);
    };
    handlers.on_closed = [tell](const std::string&) { tell(false); };
    next_link_->start(std::move(handlers), kMaxFrameBytes);
    next_link_->send(make_frame(FrameType::kJoin, own_.encode()));
  });
  constexpr Millis kBetweenLooks{50};  // between checks whether the world has ended
  const int slot = state_->begin_wait({.operation = "rendezvous", .peer = parent});
  auto status = std::future_status::timeout;
  while (status != std::future_status::ready && !state_->failed() &&
         std::chrono::steady_clock::now() < end) {
    status = is_taken.wait_until(std::min(end, std::chrono::steady_clock::now() + kBetweenLooks));
  }
  state_->end_wait(slot);
  return status == std::future_status::ready && is_taken.get();
}

void ControlLoop::enter_tree(const ControlTree& tree) {
  asio::post(io_, [this, tree] {
    tree_ = tree;
    if (broker_) broker_->drop_needless_watches();  // parents watch their children
    if (relay_) {
      listener_.reset();
      children_door_.reset();
      relay_->enter(tree);
    }
    const int parent = tree.parent(own_.rank);
    if (parent <= 0) {
      if (next_link_) next_link_->close();
      return next_link_.reset();
    }
    // Keeps reading the old link until rank 0 closes it.
    ControlLink::Handlers handlers;
    handlers.on_frame = [this](FrameType type, std::string_view body) { from_parent(type, body); };
    link_->set_handlers(std::move(handlers));
    link_->send(make_frame(FrameType::kMoved, rank_body(parent)));
    link_ = std::move(next_link_);
    member_.set_parent(parent);
    watch_parent(*link_);
    if (!link_->open()) parent_closed("its process ended");
  });
}

void ControlLoop::start_thread() {
  const AllSignalsBlocked blocked;
  arm_tick();
  thread_ = std::thread([this] { run(); });
}

void ControlLoop::run() {
  ::pthread_setname_np(::pthread_self(), "hsdp-control");
  for (;;) {
    try {
      io_.run();
      return;
    } catch (const std::exception& error) {
      member_.end(end_by_error(own_.rank, error));
    }
  }
}

void ControlLoop::stop_listening() {
  std::promise<void> done;
  asio::post(io_, [this, &done] {
    listener_.reset();
    done.set_value();
  });
  done.get_future().wait();
}

void ControlLoop::send(FrameType type, std::string body) {
  asio::post(io_, [this, type, body = std::move(body)] { to_hub(type, body); });
}

void ControlLoop::fail(const WorldEnd& world_end) {
  // Post first: a thread that the end wakes may stop this loop before the others are told.
  asio::post(io_, [this, world_end] { member_.fail(world_end); });
  state_->end(world_end);
}

void ControlLoop::run_callbacks_soon() {
  asio::post(io_, [this] { state_->run_callbacks(); });
}

void ControlLoop::to_hub(FrameType type, const std::string& body) {
  if (hub_) {
    hub_->handle(0, type, body);
  } else if (relay_ && relay_->entered()) {
    relay_->handle(own_.rank, type, body);
  } else {
    link_->send(make_frame(type, body));
  }
}

// While this rank leaves, others may still speak through it.
void ControlLoop::parent_closed(const std::string& reason) {
  if (member_.is_left() || (stop_ != Stop::kNo && (!relay_ || relay_->all_closed()))) return;
  lost_hub_ = stop_ == Stop::kNo;
  member_.parent_closed(reason);
}

void ControlLoop::tell_process_end(int rank) { to_hub(FrameType::kProcessEnd, rank_body(rank)); }

void ControlLoop::leader_ended(int leader) {
  if (leader != 0) {
    tell_process_end(leader);
  } else if (member_.parent() == 0) {
    parent_closed("its process ended");
  }
}

void ControlLoop::lead_descriptors(UniqueFd listener, std::vector<int> local_ranks) {
  asio::post(io_, [this, listener = std::make_shared<UniqueFd>(std::move(listener)),
                   local_ranks = std::move(local_ranks)] {
    DescriptorBroker::Handlers handlers;
    handlers.to_own = [this](const std::string& exchange, int from, UniqueFd fd) {
      state_->deliver_descriptor(exchange, from, std::move(fd));
    };
    handlers.on_limit = [this] { state_->note_descriptor_limit(); };
    handlers.on_process_end = [this](int rank) { tell_process_end(rank); };
    handlers.is_watched = [this](int rank) {
      return watches_.contains(rank) || (tree_.size() > 0 && tree_.parent(rank) > 0);
    };
    broker_ = std::make_unique<DescriptorBroker>(io_, std::move(*listener), local_ranks,
                                                 std::move(handlers));
  });
}

void ControlLoop::follow_descriptors(UniqueFd socket, int leader) {
  asio::post(io_, [this, leader, socket = std::make_shared<UniqueFd>(std::move(socket))] {
    descriptors_ = std::make_shared<DescriptorChannel>(io_, std::move(*socket));
    DescriptorChannel::Handlers handlers;
    handlers.on_message = [this](const std::string& text, UniqueFd fd) {
      std::string exchange;
      int from = -1;
      if (DescriptorBroker::open_envelope(text, exchange, from)) {
        state_->deliver_descriptor(exchange, from, std::move(fd));
      }
    };
    handlers.on_limit = [this] { state_->note_descriptor_limit(); };
    descriptors_->start(std::move(handlers));
    descriptors_->send(DescriptorBroker::hello(own_.rank), nullptr);
    if (leader == 0 && parent_watch_) return;
    if (const auto pid = descriptors_->peer_pid()) {
      leader_watch_ =
          std::make_unique<ProcessWatch>(io_, *pid, [this, leader] { leader_ended(leader); });
    }
  });
}

void ControlLoop::send_descriptor(std::string exchange, UniqueFd fd) {
  asio::post(
      io_, [this, exchange = std::move(exchange), fd = std::make_shared<UniqueFd>(std::move(fd))] {
        if (broker_) {
          broker_->post(own_.rank, exchange, std::move(*fd));
        } else if (descriptors_) {
          descriptors_->send(exchange, fd);
        }
      });
}

}  // namespace hsdp::comm
