// A library that claims to be some version of NCCL and has no other call.
#include <cstdlib>

extern "C" int ncclGetVersion(int* version) {
  const char* const text = std::getenv("HSDP_TEST_NCCL_VERSION");
  *version = text == nullptr ? 0 : std::atoi(text);
  return 0;
}
