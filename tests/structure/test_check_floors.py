"""Proves that check_floors finds what it is for: each case is a small tree with one violation."""

import contextlib
import io
import pathlib
import tempfile
import unittest

import check_floors


def problems(files):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return check_floors.check(root)


def include(*headers):
    return "".join(f'#include "{header}"\n' for header in headers)


class OwnIncludes(unittest.TestCase):
    def test_downward_is_allowed(self):
        self.assertEqual([], problems({
            "hsdp/dtype.h": "#include <bit>\n",
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
            "examples/smallest.cpp": include("hsdp/reducer.h", "quant/loco_hop.h"),
        }))

    def test_upward_is_found_with_its_line(self):
        upward = {
            "hsdp/dtype.h": "hsdp/device/stream.h",
            "hsdp/bucket_layout.h": "hsdp/comm/communicator.h",
            "hsdp/device/stream.cpp": "hsdp/kernels/norm.h",
            "hsdp/kernels/norm.cpp": "hsdp/comm/world.h",
            "hsdp/comm/world.cpp": "hsdp/mesh.h",
            "hsdp/mesh.cpp": "hsdp/reducer.h",
            "hsdp/reducer.cpp": "quant/loco_hop.h",
            "hsdp/snapshot.cpp": "zero/partition.h",
            "hsdp/compare.cpp": "hsdp/tools/progress_bar.h",
            "zero/partition.cpp": "bindings/module.h",
            "hsdp/plain_hop.cpp": "tests/comm/ranks.h",
            "hsdp/reducer/dtype.h": "zero/partition.h",
            "hsdp/comm/mesh.h": "hsdp/reducer/steps.h",
        }
        for path, target in upward.items():
            with self.subTest(path=path):
                found = problems({path: "// one\n" + include(target)})
                self.assertEqual(1, len(found), found)
                self.assertTrue(found[0].startswith(f"{path}:2: floor "), found)
                self.assertIn(target, found[0])

    def test_zero_and_quant_are_strangers(self):
        for path, target in (("zero/partition.h", "quant/codec.h"),
                             ("quant/codec.cpp", "zero/partition.h"),
                             ("bindings/module.cpp", "examples/digits.h"),
                             ("hsdp/tools/hsdp_run.cpp", "bindings/module.h")):
            with self.subTest(path=path):
                found = problems({path: include(target)})
                self.assertEqual(1, len(found), found)
                self.assertIn("strangers", found[0])

    def test_tools_do_not_reach_zero_or_quant(self):
        found = problems({"hsdp/tools/hsdp_check.cpp": include("quant/codec.h")})
        self.assertEqual(1, len(found), found)
        self.assertIn("hsdp/ never includes", found[0])

    def test_angle_brackets_and_spaces_do_not_hide_an_include(self):
        self.assertEqual(1, len(problems({"hsdp/dtype.h": "#  include <hsdp/mesh.h>\n"})))

    def test_a_comment_is_no_include(self):
        self.assertEqual([], problems({
            "hsdp/dtype.h": '// #include "hsdp/mesh.h"\n/*\n#include "hsdp/mesh.h"\n*/\n'}))

    def test_relative_paths_are_found(self):
        self.assertEqual(1, len(problems({"hsdp/comm/world.h": include("../dtype.h")})))


class ForeignIncludes(unittest.TestCase):
    def test_own_concern_is_allowed(self):
        self.assertEqual([], problems({
            "hsdp/comm/nccl/nccl_engine.cpp": "#include <nccl.h>\n#include <cuda_runtime.h>\n",
            "hsdp/comm/mpi/mpi_link.cpp": "#include <mpi.h>\n",
            "hsdp/comm/tcp_link.h": "#include <boost/asio/ip/tcp.hpp>\n",
            "hsdp/snapshot/hdf5_structure.cpp": "#include <hdf5.h>\n",
            "hsdp/device/cuda_stream.cpp": "#include <cuda_runtime.h>\n",
            "hsdp/kernels/sum_rows.cu": "#include <cuda_runtime.h>\n",
            "tests/bench/peer_mpi.cpp": "#include <mpi.h>\n",
        }))

    def test_elsewhere_is_found(self):
        for path, header in (("hsdp/comm/world.cpp", "nccl.h"),
                             ("hsdp/comm/nccl/nccl_engine.h", "nccl.h"),
                             ("hsdp/comm/mpi/mpi_link.h", "mpi.h"),
                             ("hsdp/reducer.cpp", "boost/asio.hpp"),
                             ("hsdp/mesh.h", "boost/asio/ip/tcp.hpp"),
                             ("hsdp/reducer.cpp", "hdf5.h"),
                             ("hsdp/comm/world.cpp", "H5Ppublic.h"),
                             ("hsdp/tools/hsdp_check.cpp", "hdf5.h"),
                             ("hsdp/reducer.h", "cuda_runtime.h"),
                             ("examples/smallest.cpp", "mpi.h"),
                             ("zero/partition.cpp", "cuda_runtime.h")):
            with self.subTest(path=path, header=header):
                found = problems({path: f"#include <{header}>\n"})
                self.assertEqual(1, len(found), found)
                self.assertIn(header, found[0])

    def test_public_headers_are_closed_and_free_of_foreign_headers(self):
        listing = "set(HSDP_PUBLIC_HEADERS\n  hsdp/comm/world.h\n  hsdp/dtype.h)\n"
        found = problems({
            "cmake/public_headers.cmake": listing,
            "hsdp/dtype.h": "",
            "hsdp/comm/world.h":
                '#include <boost/asio.hpp>\n#include "hsdp/comm/tcp_link.h"\n',
        })
        self.assertEqual(2, len(found), found)
        self.assertIn("a public header includes boost/asio.hpp", found[0])
        self.assertIn("which is not installed", found[1])

    def test_a_listed_header_must_exist(self):
        found = problems({"cmake/public_headers.cmake": "set(X hsdp/gone.h)\n"})
        self.assertEqual(["cmake/public_headers.cmake: hsdp/gone.h does not exist"], found)


class Options(unittest.TestCase):
    def test_an_option_is_no_preprocessor_switch(self):
        found = problems({"hsdp/comm/world.cpp": "\n#ifdef HSDP_HAVE_NCCL\n#endif\n"})
        self.assertEqual(1, len(found), found)
        self.assertTrue(found[0].startswith("hsdp/comm/world.cpp:2: "), found)

    def test_compiler_switches_are_allowed(self):
        self.assertEqual([], problems({"hsdp/dtype.h": "#if defined(__CUDACC__)\n#endif\n"}))


class CommandLine(unittest.TestCase):
    def test_status(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            self.assertEqual(2, self.status_of(folder))
            (root / "hsdp").mkdir()
            self.assertEqual(0, self.status_of(folder))
            (root / "hsdp" / "dtype.h").write_text(include("hsdp/mesh.h"), encoding="utf-8")
            self.assertEqual(1, self.status_of(folder))

    @staticmethod
    def status_of(folder):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return check_floors.main([folder])


if __name__ == "__main__":
    unittest.main()
