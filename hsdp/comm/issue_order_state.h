// The tasks of an IssueOrder and the thread that issues them: decides whose turn it is, alone or by
// messages to the other ranks, and runs the task. Internal to issue_order.cpp, whose lanes bring
// the tasks. `mutex` guards all members, except those that are set once and those that only the
// thread uses; `phase` may be read without it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "hsdp/comm/agreement.h"
#include "hsdp/comm/issue_order.h"
#include "hsdp/comm/recorded_turns.h"
#include "hsdp/device/host_event.h"

namespace hsdp {

struct IssueOrder::State {
  using RecordedTurns = comm::RecordedTurns;
  using LaneCount = RecordedTurns::LaneCount;

  static constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  static inline thread_local bool is_issuing = false;  // this is the thread of an IssueOrder
  // Long, as a backward pass may be slow. A waiting thread notices a wrong record earlier.
  static inline std::atomic<std::chrono::microseconds> patience{std::chrono::seconds(1)};

  struct Item {
    std::function<void()> task;
    std::function<bool()> skipped{};  // empty: a local task
    int place = 0;
    bool may_skip_later = false;
    bool ends_step = false;
    std::int64_t phase = -1;             // Issuer::phase() when it came, or OrderedTask::phase
    std::shared_ptr<HostEvent> event{};  // instead of a task
    bool ordered = false;                // once it is sorted
    bool opens = false;                  // the first bucket of a microbatch
  };
  struct Queue {
    int number = 0;
    std::deque<Item> items;
    bool meets = false;       // meet_first()
    bool opens_next = true;   // the next bucket is a microbatch's first one
    std::size_t sorted = 0;   // items at the front that are known to be ordered or local
    bool holds_back = false;  // a sorted one may still change what the next ones are
    struct Place {
      int place = 0;
      bool ends_step = false;
      std::int64_t phase = 0;
    };
    // Of ordered items.
    std::deque<Place> places;  // those in the queue
    std::int64_t issued = 0;   // number that left it
    std::int64_t told = 0;     // number that the first rank knows to be ready here
    std::int64_t chosen = 0;   // number that have got their turn
    std::int64_t unasked = 0;  // number that need no turn, from a time with one lane; or kAll
    std::vector<std::int64_t> heard;     // on the first rank: number that are ready, by rank
    bool busy = false;                   // an item is out of the queue but not done
    int open = 0;                        // live handles of open()
    std::deque<std::int64_t> unissued;   // phases of the tasks without buckets
    std::deque<std::thread::id> givers;  // the last threads that gave tasks
    std::function<void()> give;          // on_need()
    std::exception_ptr error;

    void sort();
    [[nodiscard]] bool idle() const { return items.empty() && !busy; }
    [[nodiscard]] bool has_local() const { return sorted > 0 && !items.front().ordered; }
    [[nodiscard]] bool has_ordered() const { return sorted > 0 && items.front().ordered; }
    [[nodiscard]] std::int64_t ready() const {
      return issued + static_cast<std::int64_t>(places.size());
    }
    [[nodiscard]] const Place& at(std::int64_t number_in_lane) const {
      return places[static_cast<std::size_t>(number_in_lane - issued)];
    }
  };
  // What the thread waits for, as Control knows it.
  struct Wait {
    int lane = 0;
    std::int64_t number_in_lane = 0;
    int place = 0;
    int peer = 0;  // world rank
    friend bool operator==(const Wait&, const Wait&) = default;
  };
  using Lock = std::unique_lock<std::mutex>;

  std::weak_ptr<Communicator::Engine> engine;
  std::string group_id;
  std::vector<int> members;  // world ranks; the first one chooses
  int rank = 0;              // in members

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::map<int, std::shared_ptr<Queue>> queues;
  int next_number = 0;
  bool several = false;           // there are several lanes, so turns are agreed
  std::int64_t issued_alone = 0;  // ordered items issued while there is one lane
  std::optional<RecordedTurns> record;
  std::atomic<std::int64_t> phase = 0;  // of the next item
  int late = 0;                         // live handles of come_late()
  bool owes = false;                    // late tasks are not issued yet
  bool paused = false;                  // the ranks do not know yet from where on they agree
  struct Stall {
    std::chrono::steady_clock::time_point since;
    std::int64_t taken = 0;
  };
  std::optional<Stall> stall;
  struct Message {
    int peer = 0;
    std::uint32_t generation = 0;
    std::vector<LaneCount> entries;
  };
  std::deque<Message> outbox;
  bool sending = false;
  std::uint32_t generation = 0;  // of `record`; messages of an earlier one are ignored
  bool failed = false;
  bool closing = false;
  std::optional<Wait> waiting;  // used by the thread alone
  int wait_slot = 0;

  void work();
  void let_tasks_go_first();
  [[nodiscard]] bool is_open() const;
  [[nodiscard]] bool is_idle() const;
  [[nodiscard]] comm::Saying begin_adding(const std::shared_ptr<Queue>& queue);
  void end_adding(Queue& queue, const std::optional<comm::Agreement>& all);
  void remove(int lane);
  void count_turns(int lane, std::int64_t count);
  void come(Queue& queue, Item item);
  void give_here(Queue& queue);
  [[nodiscard]] const comm::Turns& turns() const { return record->turns(); }
  [[nodiscard]] bool is_early(const Queue& queue) const;
  [[nodiscard]] bool is_meeting() const;
  [[nodiscard]] std::function<void()> needed_first(const Queue& mine);
  bool run_one_local(Lock& lock);
  void issue_front(Lock& lock, Queue& queue);
  void run_turn(Lock& lock, Queue& queue);
  [[nodiscard]] std::shared_ptr<Queue> next_in_order() const;
  [[nodiscard]] bool catches_up() const;
  [[nodiscard]] std::vector<LaneCount> take_news();
  [[nodiscard]] std::vector<LaneCount> choose_turns();
  bool speak(Lock& lock);
  void say(const std::vector<LaneCount>& entries);
  void flush(Lock& lock);
  [[nodiscard]] bool is_stalled() const;
  [[nodiscard]] bool breaks_record() const;
  bool wait_for_work(Lock& lock);
  void hear(int from, std::string_view message);
  [[nodiscard]] int missing_peer(const Queue& queue) const;
  [[nodiscard]] std::optional<Wait> awaited() const;
  bool change_wait(Lock& lock, const std::optional<Wait>& wanted);

  [[nodiscard]] std::string topic() const { return group_id + "/issue"; }
};

}  // namespace hsdp
