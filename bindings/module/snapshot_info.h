// Converts a snapshot's facts about its run to a dict and back.
#pragma once

#include <pybind11/pybind11.h>

#include "hsdp/snapshot.h"

namespace hsdp::python {

[[nodiscard]] SnapshotInfo parse_info(const pybind11::dict& given);
[[nodiscard]] pybind11::dict info_dict(const SnapshotInfo& info);

}  // namespace hsdp::python
