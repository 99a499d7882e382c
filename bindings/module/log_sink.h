// Lines of the library for Python's logging [Note: letting go of Python objects].
//
// The library writes lines on its own threads, where Python must not run. They are kept until the
// next call of ours that holds the GIL.
#pragma once

namespace hsdp::python {

// Hands kept lines to Python. Needs the GIL; cheap if there are none. Throws nothing: what logging
// raises goes to sys.unraisablehook. If that was to end the program, as KeyboardInterrupt or
// SystemExit, SIGINT is simulated afterwards.
void write_kept_lines();

}  // namespace hsdp::python
