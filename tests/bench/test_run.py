"""Tests the driver without the programs: reading reports, medians, claims."""

import dataclasses
import pathlib
import tempfile
import unittest
import unittest.mock

import claims
import gather_over_link
import programs
import run
import shaped_link
import slow_link
import stage3


def line(system="ours_shared", variant="v", op="all_reduce", dtype="f32", size=1 << 20, ranks=4,
         time_us=10.0, checked=1):
    return f"bench {system} {variant} {op} {dtype} {size} {ranks} {time_us} {checked}\n"


def samples_of(*reports):
    samples = claims.Samples()
    for output, system in reports:
        samples.add(programs.parse(output, system))
    return samples


class Reports(unittest.TestCase):
    def test_lines_are_found_behind_a_rank_prefix_and_between_noise(self):
        report = programs.parse("hello\n[0] " + line(time_us=12.5) + "[1] value cpu_percent 3.25\n",
                                "ours_tcp")
        key = programs.Key("ours_tcp", "v", "all_reduce", "f32", 1 << 20, 4)
        self.assertEqual([(key, 12.5, True)], report.times)
        self.assertEqual({"cpu_percent": 3.25}, report.values)

    def test_a_roofline_inside_another_program_keeps_its_name(self):
        report = programs.parse(line(system="roofline"), "ours_step")
        self.assertEqual("roofline", report.times[0][0].system)

    def test_torn_lines_are_no_reports(self):
        self.assertEqual([], programs.parse("bench ours v all_reduce f32 10 4 12.0\n", "x").times)


class Medians(unittest.TestCase):
    def test_median_over_rounds_then_fastest_variant(self):
        samples = samples_of(*[(line(variant="a", time_us=t) + line(variant="b", time_us=7), "mpich")
                               for t in (1, 100, 9)])
        self.assertEqual((7.0, "b"), samples.best("mpich", "all_reduce", "f32", 1 << 20, 4))

    def test_one_wrong_result_disqualifies(self):
        samples = samples_of((line(time_us=5), "gloo"), (line(time_us=1, checked=0), "gloo"),
                             (line(time_us=8), "mpich"))
        self.assertEqual((8.0, "mpich/v"), samples.fastest_peer("all_reduce", "f32", 1 << 20, 4))


def values(form, **numbers):
    """Makes reports of values; `form` is formatted with each name."""
    return [("".join(f"value {form.format(name)} {number}\n" for name, number in numbers.items()), "any")]


LINK = "slow_link_1000_{}_ms"
TORCH = "reduction in a torch step, 24 layers of 256 x 256: {} / ours"
ADDED = "torch_twentyfour_256_{}_added_ms"
OF_SIX = "6 layers of 2048 x 2048"
GATHER = "parameter gather over a slow link, f32, stage {}"
HIDDEN = GATHER + ", messages of 1 MiB: share hidden"
OVERLAPPED = GATHER + ": iteration overlapped / synchronous"
STEP = [(line(op="step", size=256 << 20, time_us=900), "openmpi_step"),
        (line(op="step", size=256 << 20, time_us=600), "impi_step"),
        (line(op="step", size=256 << 20, time_us=300) +
         line(system="roofline", op="step", size=256 << 20, time_us=240), "ours_step")]
# The reported values, the claim, its ratio and its verdict.
CLAIMS = [
    *[([(line(time_us=40), "impi"), (line(time_us=50), "openmpi"), (line(time_us=ours), "ours_shared")],
       "all_reduce 1 MiB, 4 ranks, shared memory: fastest peer / ours", 40 / ours, verdict)
      for ours, verdict in ((10, "held"), (11, "MISSED"))],
    ([(line(size=256 << 20, time_us=100) + line(size=256 << 20, dtype="bf16", time_us=110), "ours_shared")],
     "all_reduce 256 MiB, bf16: f32 / bf16, time per element", 200 / 110, "held"),
    ([(line(size=16 << 20, time_us=20) + line(size=16 << 20, ranks=2, time_us=10), "ours_shared")],
     "all_reduce 16 MiB: 4 ranks / 2 ranks, time per byte moved", 1, "held"),
    *[([(line(ranks=64, time_us=1000 * ms), "ours_private")],
       "all_reduce 1 MiB, 64 ranks, private memory: ms", ms, verdict)
      for ms, verdict in ((19, "held"), (21, "MISSED"))],
    *[(values("{}", idle_rank_cpu_percent=percent), "idle waiting rank, percent of a core", percent, verdict)
      for percent, verdict in ((4.9, "held"), (5.1, "MISSED"))],
    (STEP, "Reducer step, f32 gradients: fastest peer / ours", 2, "MISSED"),
    (STEP, "Reducer step, f32 gradients: roofline / ours", 0.8, "held"),
    (values(ADDED, fsdp2_f32=260, ours_f32=10), TORCH.format("fsdp2_f32"), 26, "held"),
    (values(ADDED, ddp=30, ours_last_only=9, ours_window=5), TORCH.format("ddp"), 6, "held"),
    (values(ADDED, fsdp2_bf16=100, ours_bf16=-3), TORCH.format("fsdp2_bf16"), None, "not measured"),
    (values("torch_six_2048_ours_{}_added_ms", f32=90, window_grad=45),
     f"reduction in a torch step, {OF_SIX}: ours_f32 / window_grad", 2, "held"),
    (values("torch_zero_{}_added_ms", ours=40, zero_redundancy=200),
     f"reduction and AdamW on slices, {OF_SIX}, 2 ranks: DDP with ZeroRedundancyOptimizer / ours", 5, "held"),
    (values("torch_zero_{}_added_ms", ours=40, whole=50),
     f"reduction and AdamW on whole parameters, {OF_SIX}, 2 ranks: on slices / whole", 0.8, "held"),
    (values("torch_zero_muon_{}_step_ms", ddp=1800, ours=1000),
     f"step with Muon, {OF_SIX}, 2 ranks: DDP / whole matrices", 1.8, "held"),
    (values(LINK, f32=700, loco=100), "step over a slow link: f32 hop / LoCo", 7, "held"),
    (values(LINK, bf16=250, loco=100), "step over a slow link: bf16 hop / LoCo", 2.5, "MISSED"),
    (values(LINK, plain4=100, loco=100), "step over a slow link: LoCo / plain 4 bit", 1, "held"),
    *[(values(LINK, **times), f"4 backward passes over a slow link, {case}", ratio, verdict)
      for times, case, ratio, verdict in [
          ({"1x2_each": 70, "1x2_window": 20}, "1x2: one by one / window", 3.5, "held"),
          ({"1x2_each": 70, "1x2_window": 20}, "2x2: one by one / window", None, "not measured"),
          ({"busy_each": 60, "busy_window": 50}, "1x2, of 50 ms each: one by one / window", 1.2, "MISSED"),
          ({"busy_each": 60, "busy_declared": 30}, "1x2, of 50 ms each: one by one / declared", 2, "held")]],
    *[(values("torch_gather_f32_1_256k_{}", hidden=hidden, forward_ms=forward, gather_ms=60, exposed_ms=9),
       HIDDEN.format(stage), ratio, verdict)
      for hidden, forward, stage, ratio, verdict in [
          (0.85, 130, 1, 0.85, "held"), (0.75, 130, 1, 0.75, "MISSED"),
          (0.85, 50, 1, None, "not measured"), (0.85, 130, 2, None, "not measured")]],
    *[(values("torch_gather_f32_2_{}_ratio", **{"256k": 0.9, "1m": slowest, "4m": 1}),
       OVERLAPPED.format(2), slowest, verdict)
      for slowest, verdict in ((1.02, "held"), (1.03, "MISSED"))],
    *[(values("torch_stage3_{}", **{"2x2_kept_ratio": ratio}),
       "stage 3 adds to a step, 2x2, kept after the forward: FSDP2 / ours", ratio, verdict)
      for ratio, verdict in ((8.0, "held"), (7.9, "MISSED"))],
    (values("torch_stage3_{}", **{"1x2_ours_hidden": 0.81}),
     "stage 3 over a slow link: share of gathers hidden", 0.81, "held"),
]


def claims_of(*reports):
    return {claim.name: claim for claim in claims.claims(samples_of(*reports), lambda size: True)}


class Claims(unittest.TestCase):
    def test_ratios_and_verdicts(self):
        for reports, name, ratio, verdict in CLAIMS:
            with self.subTest(name, verdict=verdict):
                claim = claims_of(*reports)[name]
                self.assertEqual(verdict, claim.verdict)
                if ratio is None:
                    self.assertIsNone(claim.ratio)
                else:
                    self.assertAlmostEqual(ratio, claim.ratio)

    def test_what_decided_is_in_the_detail(self):
        self.assertEqual("impi_step/v",
                         claims_of(*STEP)["Reducer step, f32 gradients: fastest peer / ours"].detail)
        slowest = values("torch_gather_f32_2_{}_ratio", **{"256k": 0.9, "1m": 1.01, "4m": 1})
        self.assertIn("1m elements", claims_of(*slowest)[OVERLAPPED.format(2)].detail)

    def test_what_is_missing_is_not_measured(self):
        for claim in claims_of().values():
            self.assertEqual("not measured", claim.verdict)

    def test_claims_are_about_what_is_measured(self):
        self.assertLessEqual({*claims.GATHER_CASES}, {*gather_over_link.CASES})
        self.assertEqual(claims.GATHER_BUCKETS, tuple(gather_over_link.BUCKETS))
        self.assertEqual(claims.STAGE3_MESHES, tuple(stage3.MESHES))


class OverLink(unittest.TestCase):
    def test_the_link_sleeps_where_none_can_be_shaped(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "tests", "bench", "ours_hop")
            program.parent.mkdir(parents=True)
            program.write_text('#!/bin/sh\nfor rate; do :; done\n[ "$RANK" = 0 ] && '
                               'echo "step of$WORLD_SIZE 16 ${rate#*=} 8"\n:\n', encoding="utf-8")
            program.chmod(0o755)
            link = slow_link.SlowLink(pathlib.Path(folder))
            self.assertIsNone(link.missing())
            with unittest.mock.patch.object(slow_link, "why_not_shaped", lambda: "no root"):
                report = link.measure(1, [1000, 300], ["hops", "2x2"])
            self.assertFalse(report.error)
            self.assertEqual({"slow_link_sleeps": 1,
                              "slow_link_1000_of2_ms": 1000, "slow_link_1000_2x2_of4_ms": 1000,
                              "slow_link_300_of2_ms": 300, "slow_link_300_2x2_of4_ms": 300},
                             report.values)

    def test_gathers_need_a_link_that_can_be_shaped_and_torch(self):
        with tempfile.TemporaryDirectory() as folder:
            part = gather_over_link.GatherOverLink(pathlib.Path(folder, "release"))
            for reason, expected in (("no root", "no link can be shaped: no root"),
                                     ("", "venv/bin/python is not there; run make test")):
                with unittest.mock.patch.object(shaped_link, "why_not_shaped", lambda: reason):
                    self.assertIn(expected, part.missing())

    def test_gathers_are_measured_by_two_pinned_ranks(self):
        ran = []

        def run_ranks(_, commands):
            ran.extend(commands)
            return "value torch_gather_f32_1_256k_ratio 0.9\n", "slow link: status 1"

        with unittest.mock.patch.multiple(shaped_link, run_ranks=run_ranks,
                                          ShapedLink=unittest.mock.MagicMock()):
            report = gather_over_link.GatherOverLink(pathlib.Path("release")).measure(1)
        self.assertEqual(2, len(ran))
        for command in ran:
            self.assertEqual(["taskset", "-c"], command[:2])
            self.assertIn(f"PYTHONPATH={pathlib.Path('release/python').resolve()}", command)
            self.assertEqual(f"--rounds={gather_over_link.LEAST_ROUNDS}", command[-1])
        self.assertEqual({"torch_gather_f32_1_256k_ratio": 0.9}, report.values)
        self.assertIn("torch_gather: slow link: status 1", report.error)

    def test_tables(self):
        class Sevens(dict):
            def __missing__(self, name):
                self[name] = 0.5 if name.endswith("_hidden") else 7
                return self[name]

        for part, tables, prefix, rows in [
                (gather_over_link, gather_over_link.table, "torch_gather_",
                 [2 + 3 * 2 * 3, "| f32 | 1 | 256 Ki | 7 | 7.0 | 7.0 | 50% | 7 | 7 | 7.000 |"]),
                (stage3, stage3.tables, "torch_stage3_",
                 [2 * 3 + 4 * 4, "| 2x2, kept | 7 | 7 | 7.0 |", "| hsdp | 7 | 7 | 7 | 50% |"])]:
            with self.subTest(part.__name__):
                asked = Sevens()
                lines = tables(asked).splitlines()
                self.assertEqual(rows[0], len(lines))
                self.assertLessEqual({*rows[1:]}, {*lines})
                self.assertTrue(all(name.startswith(prefix) for name in asked))
                for upper, lower in zip(lines, lines[1:]):
                    if upper and lower:
                        self.assertEqual(upper.count("|"), lower.count("|"))


class Plan(unittest.TestCase):
    def test_every_round_runs_every_program_at_both_sizes(self):
        runs = run.plan_of_round([64 << 10], with_steps=False)
        self.assertEqual(2 * len(run.PROGRAMS) + 1, len(runs))

    def test_64_ranks_reduce_private_memory_where_a_mebibyte_is_asked_for(self):
        for size, expected in ((64 << 10, []), (1 << 20, [["all_reduce:f32:1048576"]])):
            runs = run.plan_of_round([size], with_steps=False)
            self.assertEqual(expected, [one.arguments for one in runs if one.ranks == 64])

    def test_each_step_peer_is_narrowed_to_its_fastest_variant(self):
        for system in claims.STEP_PEERS:
            samples = samples_of((line(variant="a", op="step", size=256 << 20, time_us=9) +
                                  line(variant="b", op="step", size=256 << 20, time_us=8), system))
            step = [one for one in run.plan_of_round([1 << 20], with_steps=True)
                    if one.program.system == system][0]
            self.assertEqual(["--gradient=f32", "--variant=b"], run.narrowed(step, samples))

    def test_a_setting_runs_on_where_it_is_the_fastest(self):
        runs = [one for one in run.plan_of_round([1 << 20, 16 << 20], with_steps=False)
                if one.program.system == "impi" and one.ranks == 4]
        samples = claims.Samples()
        for one, times in zip(runs, [(5, 9), (6, 8), (7, 7)]):
            samples.add(programs.parse("".join(line(size=size, time_us=time_us) for size, time_us
                                               in zip((1 << 20, 16 << 20), times)),
                                       "impi", one.program.setting))
        self.assertEqual([["all_reduce:f32:1048576"], [], ["all_reduce:f32:16777216"]],
                         [[case for case in run.narrowed(one, samples) if "all" in case]
                          for one in runs[:3]])
        self.assertEqual((7.0, "v+" + runs[2].program.setting),
                         samples.best("impi", "all_reduce", "f32", 16 << 20, 4))

    def test_every_peer_is_run(self):
        systems = {one.program.system for one in run.plan_of_round([1 << 20], with_steps=True)}
        self.assertLessEqual({*claims.PEERS, *claims.STEP_PEERS}, systems)

    def test_a_program_that_was_not_built_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            launcher = programs.Launcher(pathlib.Path(folder))
            self.assertIn("was not built", launcher.missing(run.PROGRAMS[0]))


class Launch(unittest.TestCase):
    def test_intel_mpi_is_the_one_that_its_peer_was_built_with(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name).resolve()
            bench = folder / "build" / "tests" / "bench"
            bench.mkdir(parents=True)
            (bench / "peer_impi").touch()
            mpiexec = folder / "impi" / "bin" / "mpiexec.hydra"
            mpiexec.parent.mkdir(parents=True)
            mpiexec.write_text('#!/bin/sh\n'
                               f'[ "$I_MPI_ROOT" = {folder}/impi ] && echo "value ranks $2"\n'
                               '[ "$A" = b ] && echo "value setting 1"\n')
            mpiexec.chmod(0o755)
            impi = [one for one in run.PROGRAMS if one.system == "impi"][0]
            self.assertIn("mpiexec.impi", programs.Launcher(folder / "build").missing(impi))
            (bench / "mpiexec.impi").symlink_to(mpiexec)
            launcher = programs.Launcher(folder / "build")
            self.assertIsNone(launcher.missing(impi))
            report = launcher.run(dataclasses.replace(impi, setting="A=b"), 3, [])
            self.assertEqual((None, {"ranks": 3.0, "setting": 1.0}), (report.error, report.values))


class Table(unittest.TestCase):
    def test_both_kinds_of_memory_stand_beside_the_fastest_peer(self):
        samples = samples_of((line(time_us=60), "impi"), (line(time_us=90), "gloo"),
                             (line(time_us=10), "ours_shared"), (line(time_us=40), "ours_private"))
        header, *rows = run.times_table(samples, [1 << 20])
        self.assertEqual(["peer/shared", "peer/private"], header.split()[-2:])
        found = [row.split()[-2:] for row in rows if row.startswith("all_reduce     4 ranks")]
        self.assertEqual([["6.00", "1.50"]], found)

    def test_what_missed_its_target_stands_out_in_the_docs(self):
        text = run.markdown([claims.Claim("a", 1.234, 2.0, "impi/v"),
                             claims.Claim("b", None, 5.0, "", at_most=True)], ["header", "row"])
        self.assertIn("| a | 1.23 | at least 2 | **missed** | impi/v |\n"
                      "| b | - | at most 5 | not measured |  |\n", text)
        self.assertTrue(text.endswith("```\nheader\nrow\n```\n"))


if __name__ == "__main__":
    unittest.main()
