#include "nccl_machine.h"

#include <algorithm>
#include <chrono>

namespace hsdp::stand_in {

Machine& machine() {
  static auto* const one = new Machine;  // outlives the streams of static objects
  return *one;
}

bool Member::is_enrolled(const void* memory) const {
  const auto* const place = static_cast<const char*>(memory);
  return std::ranges::any_of(enrolled, [place](const auto& block) {
    const auto* const begin = static_cast<const char*>(block.first);
    return begin <= place && place < begin + block.second;
  });
}

Transfer::Transfer(std::shared_ptr<Member> member, const std::vector<Op>& ops)
    : member_(std::move(member)) {
  const auto ranks = static_cast<std::size_t>(member_->clique->size);
  for (const Op& op : ops) {
    const std::size_t in = op.kind == Op::Kind::kReduceScatter ? ranks * op.bytes : op.bytes;
    const std::size_t out = op.kind == Op::Kind::kGather ? ranks * op.bytes : op.bytes;
    if (op.in != nullptr) memory_.emplace_back(static_cast<const char*>(op.in), in);
    if (op.out != nullptr) memory_.emplace_back(static_cast<const char*>(op.out), out);
  }
  ++member_->transfers;
  machine().transfers.insert(this);
}

Transfer::~Transfer() {
  {
    const std::lock_guard lock(machine().mutex);
    --member_->transfers;
    machine().transfers.erase(this);
  }
  machine().changed.notify_all();
}

bool Transfer::uses(const void* memory, std::size_t size) const {
  const auto* const begin = static_cast<const char*>(memory);
  return std::ranges::any_of(memory_, [&](const auto& used) {
    return begin < used.first + used.second && used.first < begin + size;
  });
}

std::shared_ptr<Clique> Machine::new_clique(int size) {
  auto clique = std::make_shared<Clique>();
  clique->number = next_clique++;
  clique->size = size;
  return clique;
}

void Machine::reset() {
  release();
  const Locked lock;
  errors.clear();
  failing_call.reset();
  log.clear();
  abort_count = revoke_count = race_count = 0;
  for (ncclComm_t const comm : comms) comm->member->launching = -1;  // of a job that has ended
}

void Machine::set_error(int rank, int result) {
  Locked()->errors[rank] = static_cast<ncclResult_t>(result);
}
void Machine::fail_call(const FailingNcclCall& which) { Locked()->failing_call = which; }
void Machine::hang(int rank) { Locked()->hanging.insert(rank); }
void Machine::hang_aborts() { Locked()->aborts_hang = true; }

void Machine::release() {
  {
    const Locked lock;
    hanging.clear();
    aborts_hang = false;
  }
  changed.notify_all();
}

Machine::Ending Machine::ending_of(int rank, const char* call) {
  if (!failing_call || failing_call->rank != rank || failing_call->name != call) return {};
  if (--failing_call->after >= 0) return {};
  const Ending ending{static_cast<ncclResult_t>(failing_call->result), failing_call->late};
  if (--failing_call->times <= 0) failing_call.reset();
  return ending;
}

std::vector<NcclCall> Machine::calls(int rank) const { return Locked()->log[rank]; }
int Machine::communicators() const { return static_cast<int>(Locked()->comms.size()); }
int Machine::aborts() const { return Locked()->abort_count; }
int Machine::revokes() const { return Locked()->revoke_count; }
int Machine::races() const { return Locked()->race_count; }
std::int64_t Machine::allocated() const { return std::ssize(Locked()->blocks); }
int Machine::enrolled() const {
  const Locked lock;
  std::size_t count = 0;
  for (ncclComm_t const comm : comms) count += comm->member->enrolled.size();
  return static_cast<int>(count);
}

namespace {

// The ops of one group on one rank. Every wait ends when the rank's communicator ends.
class Run {
 public:
  Run(Member& member, const std::vector<Op>& ops)
      : member_(member), ops_(ops), m_(machine()), lock_(m_.mutex) {}

  void run() {
    const bool moved = move();
    if (is_broken(member_.device)) return;  // nothing of it runs any more
    if (!moved) return ruin();
    for (const auto& write : writes_) write();
  }

 private:
  template <typename Ready>
  bool wait(Ready ready) {
    constexpr std::chrono::milliseconds kPeriod{2};  // how often the device is looked at
    const auto has_ended = [this] { return member_.ended || is_broken(member_.device); };
    while (!ready() && !has_ended()) m_.changed.wait_for(lock_, kPeriod);
    return ready() && !has_ended();
  }

  // Whether everything has been sent and received.
  bool move() {
    if (!wait([this] { return !m_.hanging.contains(member_.world_rank); })) return false;
    for (const Op& op : ops_) send(op);
    for (const Op& op : ops_) {
      if (!receive(op)) break;
    }
    const bool all_taken = wait([this] {
      return std::ranges::all_of(sent_, [](const auto& message) { return message->taken; });
    });
    if (!all_taken) take_back();
    return all_taken;
  }

  // What an aborted kernel leaves in its outputs. It does not write the part that it sends in
  // place.
  void ruin() {
    for (const Op& op : ops_) {
      const bool has_all = op.kind == Op::Kind::kGather;
      const auto rows = static_cast<std::size_t>(has_all ? size() : 1);
      const bool root = op.kind == Op::Kind::kBroadcast && op.peer == member_.rank;
      const auto* const kept = has_all || root ? static_cast<const unsigned char*>(op.in) : nullptr;
      auto* const out = static_cast<unsigned char*>(op.out);
      for (std::size_t i = 0; out != nullptr && i < rows * op.bytes; ++i) {
        const bool is_kept = kept != nullptr && out + i >= kept && out + i < kept + op.bytes;
        if (!is_kept) out[i] = static_cast<unsigned char>(m_.garbage());
      }
    }
  }

  [[nodiscard]] int size() const { return member_.clique->size; }
  template <typename Visit>
  void each_peer(Visit visit) {
    for (int r = 0; r < size(); ++r) {
      if (r != member_.rank) visit(r);
    }
  }

  void post(int to, const void* data, std::size_t bytes) {
    auto message =
        std::make_shared<Message>(Message{data, bytes, member_.device, member_.is_enrolled(data)});
    member_.clique->mail[{member_.rank, to}].push_back(message);
    sent_.push_back(std::move(message));
    m_.changed.notify_all();
  }

  void send(const Op& op) {
    const auto* const in = static_cast<const char*>(op.in);
    switch (op.kind) {
      case Op::Kind::kSend:
        return post(op.peer, in, op.bytes);
      case Op::Kind::kReceive:
        return;
      case Op::Kind::kGather:
      case Op::Kind::kReduce:
        return each_peer([&](int r) { post(r, in, op.bytes); });
      case Op::Kind::kBroadcast:
        if (op.peer == member_.rank) each_peer([&](int r) { post(r, in, op.bytes); });
        return;
      case Op::Kind::kReduceScatter:
        return each_peer(
            [&](int r) { post(r, in + static_cast<std::size_t>(r) * op.bytes, op.bytes); });
    }
  }

  bool take(int from, void* to, std::size_t bytes, bool of_two = false) {
    Mail& mail = member_.clique->mail[{from, member_.rank}];
    if (!wait([&] { return !mail.empty() && !is_broken(mail.front()->device); })) return false;
    const std::shared_ptr<Message> message = mail.front();
    // One side writes to the other's memory, which receives messages through a buffer of NCCL.
    if (of_two && message->enrolled != member_.is_enrolled(to)) return wait([] { return false; });
    mail.pop_front();
    if (message->bytes == bytes) {
      std::memcpy(to, message->data, bytes);
    } else {
      member_.error = ncclInvalidUsage;
    }
    message->taken = true;
    m_.changed.notify_all();
    return true;
  }

  bool receive(const Op& op) {
    auto* const out = static_cast<char*>(op.out);
    switch (op.kind) {
      case Op::Kind::kSend:
        return true;
      case Op::Kind::kReceive:
        return take(op.peer, out, op.bytes, true);
      case Op::Kind::kGather: {
        bool complete = true;
        each_peer([&](int r) {
          complete = complete && take(r, out + static_cast<std::size_t>(r) * op.bytes, op.bytes);
        });
        char* const own = out + static_cast<std::size_t>(member_.rank) * op.bytes;
        if (own != op.in) std::memcpy(own, op.in, op.bytes);
        return complete;
      }
      case Op::Kind::kBroadcast:
        return op.peer == member_.rank || take(op.peer, out, op.bytes);
      case Op::Kind::kReduce:
        return reduce(op, static_cast<const char*>(op.in));
      case Op::Kind::kReduceScatter:
        return reduce(op, static_cast<const char*>(op.in) +
                              static_cast<std::size_t>(member_.rank) * op.bytes);
    }
    return false;
  }

  // Sums in descending rank, unlike the exact sum.
  bool reduce(const Op& op, const char* own) {
    std::vector<std::vector<float>> rows(static_cast<std::size_t>(size()),
                                         std::vector<float>(op.bytes / sizeof(float)));
    bool complete = true;
    each_peer([&](int r) {
      complete = complete && take(r, rows[static_cast<std::size_t>(r)].data(), op.bytes);
    });
    if (!complete) return false;
    std::memcpy(rows[static_cast<std::size_t>(member_.rank)].data(), own, op.bytes);
    std::vector<float> sum = rows.back();
    for (std::size_t r = rows.size() - 1; r-- > 0;) {
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += rows[r][i];
    }
    // Peers may still read the input, which may also be the output.
    writes_.emplace_back([sum, out = op.out] {
      if (!sum.empty()) std::memcpy(out, sum.data(), sum.size() * sizeof(float));
    });
    return true;
  }

  void take_back() {
    for (auto& [_, mail] : member_.clique->mail) {
      std::erase_if(mail, [this](const auto& message) {
        return std::ranges::find(sent_, message) != sent_.end();
      });
    }
  }

  Member& member_;
  const std::vector<Op>& ops_;
  Machine& m_;
  std::unique_lock<std::mutex> lock_;
  std::vector<std::shared_ptr<Message>> sent_;
  std::vector<std::function<void()>> writes_;
};

}  // namespace

void run_ops(Member& member, const std::vector<Op>& ops) { Run(member, ops).run(); }

}  // namespace hsdp::stand_in

hsdp::stand_in::NcclStandIn* hsdp_nccl_stand_in() { return &hsdp::stand_in::machine(); }
