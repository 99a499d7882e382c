"""Proves that check_floors finds what it is for: each case is a small tree with one violation."""

import contextlib
import io
import unittest

import check_floors
from tree import tree


def problems(files):
    with tree(files) as root:
        return check_floors.check(root)


def include(*headers):
    return "".join(f'#include "{header}"\n' for header in headers)


UPWARD, STRANGERS = "includes run downward", "are strangers"


class Includes(unittest.TestCase):
    def test_what_is_allowed(self):
        self.assertEqual([], problems({
            "hsdp/dtype.h": "#include <bit>\n#if defined(__CUDACC__)\n#endif\n",
            "hsdp/device/stream.h": include("hsdp/dtype.h"),
            "hsdp/kernels/norm.h": include("hsdp/device/stream.h"),
            "hsdp/comm/world.h": include("hsdp/kernels/norm.h", "hsdp/device/stream.h"),
            "hsdp/mesh.h": include("hsdp/comm/world.h"),
            "hsdp/reducer.cpp": include("hsdp/mesh.h", "hsdp/snapshot.h", "hsdp/reducer/steps.h"),
            "hsdp/reducer/steps.cpp": include("hsdp/reducer.h", "hsdp/mesh.h"),
            "zero/partition.h": include("hsdp/reducer.h"),
            "quant/loco_hop.h": include("hsdp/replica_hop.h"),
            "bindings/module.cpp": include("zero/partition.h", "quant/loco_hop.h"),
            "hsdp/tools/hsdp_check.cpp": include("hsdp/compare.h"),
            "hsdp/tools/plan_report.cpp": include("zero/partition.h", "quant/loco_hop.h"),
            "examples/smallest.cpp": include("hsdp/reducer.h", "quant/loco_hop.h"),
            "hsdp/comm/nccl/nccl_engine.cpp": include("nccl.h", "cuda_runtime.h"),
            "hsdp/comm/mpi/mpi_link.cpp": include("mpi.h"),
            "hsdp/comm/tcp_link.h": include("boost/asio/ip/tcp.hpp"),
            "hsdp/snapshot/hdf5_structure.cpp": include("hdf5.h"),
            "hsdp/device/cuda_stream.cpp": include("cuda_runtime.h"),
            "hsdp/kernels/sum_rows.cu": include("cuda_runtime.h"),
            "tests/bench/peer_mpi.cpp": include("mpi.h"),
        }))

    def test_what_is_found_and_how_it_is_told(self):
        for path, target, told in [
                ("hsdp/dtype.h", "hsdp/device/stream.h", UPWARD),
                ("hsdp/bucket_layout.h", "hsdp/comm/communicator.h", UPWARD),
                ("hsdp/device/stream.cpp", "hsdp/kernels/norm.h", UPWARD),
                ("hsdp/kernels/norm.cpp", "hsdp/comm/world.h", UPWARD),
                ("hsdp/comm/world.cpp", "hsdp/mesh.h", UPWARD),
                ("hsdp/mesh.cpp", "hsdp/reducer.h", UPWARD),
                ("hsdp/reducer.cpp", "quant/loco_hop.h", UPWARD),
                ("hsdp/snapshot.cpp", "zero/partition.h", UPWARD),
                ("hsdp/compare.cpp", "hsdp/tools/progress_bar.h", UPWARD),
                ("zero/partition.cpp", "bindings/module.h", UPWARD),
                ("hsdp/plain_hop.cpp", "tests/comm/ranks.h", UPWARD),
                ("hsdp/reducer/dtype.h", "zero/partition.h", UPWARD),
                ("hsdp/comm/mesh.h", "hsdp/reducer/steps.h", UPWARD),
                ("zero/partition.h", "quant/codec.h", STRANGERS),
                ("quant/codec.cpp", "zero/partition.h", STRANGERS),
                ("bindings/module.cpp", "examples/digits.h", STRANGERS),
                ("hsdp/tools/hsdp_run.cpp", "bindings/module.h", STRANGERS),
                ("hsdp/comm/world.h", "../dtype.h", "name headers from the repository root"),
                ("hsdp/comm/world.cpp", "nccl.h", "NCCL stays in the files of its own concern"),
                ("hsdp/comm/nccl/nccl_engine.h", "nccl.h", "NCCL stays in source files"),
                ("hsdp/comm/mpi/mpi_link.h", "mpi.h", "MPI stays in source files"),
                ("hsdp/reducer.cpp", "boost/asio.hpp", "Boost.Asio stays in the files"),
                ("hsdp/mesh.h", "boost/asio/ip/tcp.hpp", "Boost.Asio stays in the files"),
                ("hsdp/reducer.cpp", "hdf5.h", "HDF5 stays in the files"),
                ("hsdp/comm/world.cpp", "H5Ppublic.h", "HDF5 stays in the files"),
                ("hsdp/tools/hsdp_check.cpp", "hdf5.h", "HDF5 stays in the files"),
                ("hsdp/reducer.h", "cuda_runtime.h", "CUDA stays in the files"),
                ("examples/smallest.cpp", "mpi.h", "MPI stays in the files"),
                ("zero/partition.cpp", "cuda_runtime.h", "CUDA stays in the files")]:
            with self.subTest(path=path, target=target):
                found = problems({path: "// one\n" + include(target)})
                self.assertEqual(1, len(found), found)
                self.assertTrue(found[0].startswith(f"{path}:2: "), found)
                self.assertIn(target, found[0])
                self.assertIn(told, found[0])

    def test_angle_brackets_and_spaces_do_not_hide_an_include(self):
        self.assertEqual(1, len(problems({"hsdp/dtype.h": "#  include <hsdp/mesh.h>\n"})))

    def test_a_comment_is_no_include(self):
        self.assertEqual([], problems({
            "hsdp/dtype.h": '// #include "hsdp/mesh.h"\n/*\n#include "hsdp/mesh.h"\n*/\n'}))

    def test_public_headers_are_closed_and_free_of_foreign_headers(self):
        listing = "set(HSDP_PUBLIC_HEADERS\n  hsdp/comm/world.h\n  hsdp/dtype.h hsdp/gone.h)\n"
        gone, foreign, not_installed = problems({
            "cmake/public_headers.cmake": listing,
            "hsdp/dtype.h": "",
            "hsdp/comm/world.h":
                '#include <boost/asio.hpp>\n#include "hsdp/comm/tcp_link.h"\n',
        })
        self.assertEqual("cmake/public_headers.cmake: hsdp/gone.h does not exist", gone)
        self.assertIn("a public header includes boost/asio.hpp", foreign)
        self.assertIn("which is not installed", not_installed)

    def test_an_option_is_no_preprocessor_switch(self):
        found = problems({"hsdp/comm/world.cpp": "\n#ifdef HSDP_HAVE_NCCL\n#endif\n"})
        self.assertEqual(1, len(found), found)
        self.assertTrue(found[0].startswith("hsdp/comm/world.cpp:2: "), found)


class CommandLine(unittest.TestCase):
    def test_status(self):
        for status, files in [(2, {}), (0, {"hsdp/dtype.h": ""}), (1, {"hsdp/dtype.h": include("hsdp/mesh.h")})]:
            with tree(files) as root:
                self.assertEqual(status, self.status_of(str(root)))

    @staticmethod
    def status_of(folder):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return check_floors.main([folder])


if __name__ == "__main__":
    unittest.main()
