// Lines of the library for Python's logging [Note: letting go of Python objects].
//
// The library writes lines on its own threads, where Python must not run. They are kept until the
// next call of ours that holds the GIL.
#pragma once

namespace hsdp::python {

// Hands kept lines to Python. Needs the GIL; cheap if there is none. Throws nothing: what logging
// raises goes to sys.unraisablehook, and Ctrl-C comes again as a signal.
void write_kept_lines();

}  // namespace hsdp::python
