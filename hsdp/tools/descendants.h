// The processes below this one.
#pragma once

namespace hsdp::tools {

// From now on descendants that lose their parent become children of this process.
void adopt_orphans();

// SIGKILL to every descendant, also in groups and sessions of their own, until none is left. Needs
// adopt_orphans(). Gives up after 5 s: a process stuck in the kernel dies when it comes out.
void kill_descendants();

}  // namespace hsdp::tools
