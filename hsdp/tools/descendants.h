// The descendants of this process.
#pragma once

namespace hsdp::tools {

// From now on, descendants that lose their parent become children of this process.
void adopt_orphans();

// Sends SIGKILL to every descendant, even in other process groups and sessions, until none is left.
// Needs adopt_orphans(). Gives up after 5 s: a process stuck in the kernel dies when it leaves it.
void kill_descendants();

}  // namespace hsdp::tools
