"""The driver without the programs: reading reports, medians, claims."""

import dataclasses
import pathlib
import tempfile
import unittest
import unittest.mock

import claims
import gather_over_link
import programs
import run
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


def samples_with(form, numbers):
    """Samples of values, whose names `form` has a place for."""
    return samples_of(("".join(f"value {form.format(name)} {number}\n"
                               for name, number in numbers.items()), "any"))


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


class Claims(unittest.TestCase):
    def verdicts(self, samples, sizes=(1 << 20,)):
        return {claim.name: claim for claim in claims.claims(samples, lambda size: size in sizes)}

    def test_steps_in_torch(self):
        name = "reduction in a torch step, 24 layers of 256 x 256: {} / ours"
        values = {"fsdp2_f32": 260, "ours_f32": 10, "ddp": 30, "ours_last_only": 9,
                  "ours_window": 5, "fsdp2_bf16": 100, "ours_bf16": -3}
        samples = samples_with("torch_twentyfour_256_{}_added_ms", values)
        found = self.verdicts(samples)
        for peer, ratio in (("fsdp2_f32", 26), ("ddp", 6)):
            self.assertAlmostEqual(ratio, found[name.format(peer)].ratio)
            self.assertEqual("held", found[name.format(peer)].verdict)
        sized = self.verdicts(samples_with("torch_{}_ms", {
            "six_2048_ours_f32_added": 90, "six_2048_ours_window_grad_added": 45,
            "zero_ours_added": 40, "zero_zero_redundancy_added": 200, "zero_whole_added": 50,
            "zero_muon_ddp_step": 1800, "zero_muon_ours_step": 1000}))
        size = "6 layers of 2048 x 2048"
        for claim, ratio in (
                (f"reduction in a torch step, {size}: ours_f32 / window_grad", 2),
                (f"reduction and AdamW on slices, {size}, 2 ranks: DDP with ZeroRedundancyOptimizer / "
                 "ours", 5),
                (f"reduction and AdamW on whole parameters, {size}, 2 ranks: on slices / whole", 0.8),
                (f"step with Muon, {size}, 2 ranks: DDP / whole matrices", 1.8)):
            self.assertEqual(ratio, sized[claim].ratio, claim)
        lost_in_noise = name.format("fsdp2_bf16")
        other = "reduction in a torch step, 6 layers of 2048 x 2048: ddp / ours"
        for claim in (lost_in_noise, other):
            self.assertEqual("not measured", found[claim].verdict)

    def test_slow_link(self):
        times = {"f32": 700, "bf16": 250, "plain4": 100, "loco": 100}
        found = self.verdicts(samples_with("slow_link_1000_{}_ms", times))
        for claim, ratio, verdict in (("f32 hop / LoCo", 7, "held"), ("bf16 hop / LoCo", 2.5, "MISSED"),
                                      ("LoCo / plain 4 bit", 1, "held")):
            claim = found[f"step over a slow link: {claim}"]
            self.assertEqual((ratio, verdict), (claim.ratio, claim.verdict))

    def test_windows_over_a_slow_link(self):
        found = self.verdicts(samples_with("slow_link_1000_{}_ms", {
            "1x2_each": 70, "1x2_window": 20, "busy_each": 60, "busy_window": 50,
            "busy_declared": 30}))
        for case, ratio, verdict in (("1x2: one by one / window", 3.5, "held"),
                                     ("2x2: one by one / window", None, "not measured"),
                                     ("1x2, of 50 ms each: one by one / window", 1.2, "MISSED"),
                                     ("1x2, of 50 ms each: one by one / declared", 2, "held")):
            claim = found[f"4 backward passes over a slow link, {case}"]
            self.assertEqual((ratio, verdict), (claim.ratio, claim.verdict))

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

    def test_parameter_gathers_over_a_slow_link(self):
        case = "parameter gather over a slow link, f32, stage {}"
        share = case + ", messages of 1 MiB: share hidden"
        for hidden, forward, verdict in ((0.85, 130, "held"), (0.75, 130, "MISSED"),
                                         (0.85, 50, "not measured")):
            values = {"hidden": hidden, "forward_ms": forward, "gather_ms": 60, "exposed_ms": 9}
            found = self.verdicts(samples_with("torch_gather_f32_1_256k_{}", values))
            self.assertEqual(verdict, found[share.format(1)].verdict)
            self.assertEqual("not measured", found[share.format(2)].verdict)
        for slowest, verdict in ((1.02, "held"), (1.03, "MISSED")):
            samples = samples_with("torch_gather_f32_2_{}_ratio",
                                   {"256k": 0.9, "1m": slowest, "4m": 1})
            claim = self.verdicts(samples)[case.format(2) + ": iteration overlapped / synchronous"]
            self.assertEqual((slowest, verdict), (claim.ratio, claim.verdict))
            self.assertIn("1m elements", claim.detail)

    def test_gathers_need_a_link_that_can_be_shaped_and_torch(self):
        with tempfile.TemporaryDirectory() as folder:
            part = gather_over_link.GatherOverLink(pathlib.Path(folder, "release"))
            for reason, expected in (("no root", "no link can be shaped: no root"),
                                     ("", "venv/bin/python is not there; run make test")):
                with unittest.mock.patch.object(gather_over_link, "why_not_shaped",
                                                lambda: reason):
                    self.assertIn(expected, part.missing())

    def test_gathers_are_measured_by_two_pinned_ranks(self):
        ran = []

        def run_ranks(_, commands):
            ran.extend(commands)
            return "value torch_gather_f32_1_256k_ratio 0.9\n", "slow link: status 1"

        with unittest.mock.patch.multiple(gather_over_link, run_ranks=run_ranks,
                                          ShapedLink=unittest.mock.MagicMock()):
            report = gather_over_link.GatherOverLink(pathlib.Path("release")).measure(1)
        self.assertEqual(2, len(ran))
        for command in ran:
            self.assertEqual(["taskset", "-c"], command[:2])
            self.assertIn(f"PYTHONPATH={pathlib.Path('release/python').resolve()}", command)
            self.assertEqual(f"--rounds={gather_over_link.LEAST_ROUNDS}", command[-1])
        self.assertEqual({"torch_gather_f32_1_256k_ratio": 0.9}, report.values)
        self.assertIn("torch_gather: slow link: status 1", report.error)

    def test_a_table_of_gathers_has_what_the_claims_are_about(self):
        values = {f"torch_gather_{case}_{stage}_{bucket}_{column}": 0.875
                  for case in gather_over_link.CASES for stage in (1, 2)
                  for bucket in gather_over_link.BUCKETS for column in gather_over_link.COLUMNS}
        lines = gather_over_link.table(values).splitlines()
        self.assertEqual(2 + 3 * 2 * 3, len(lines))
        self.assertEqual({lines[0].count("|")}, {line.count("|") for line in lines})
        self.assertIn("| 88% | 1 | 1 | 0.875 |", lines[2])
        self.assertLessEqual({*claims.GATHER_CASES}, {*gather_over_link.CASES})
        self.assertEqual(claims.GATHER_BUCKETS, tuple(gather_over_link.BUCKETS))

    def test_stage_3(self):
        name = "stage 3 adds to a step, 2x2, kept after the forward: FSDP2 / ours"
        for ratio, verdict in ((8.0, "held"), (7.9, "MISSED")):
            samples = samples_with("torch_stage3_{}", {"2x2_kept_ratio": ratio,
                                                       "1x2_ours_hidden": 0.81})
            found = self.verdicts(samples)
            self.assertEqual((ratio, verdict), (found[name].ratio, found[name].verdict))
            self.assertEqual("held", found["stage 3 over a slow link: share of gathers hidden"].verdict)
        self.assertEqual(claims.STAGE3_MESHES, tuple(stage3.MESHES))

    def test_tables_of_stage_3(self):
        class Sevens(dict):
            def __missing__(self, name):
                self[name] = 0.5 if name.endswith("_hidden") else 7
                return self[name]

        values = Sevens()
        lines = stage3.tables(values).splitlines()
        self.assertEqual(2 * 3 + 4 * 4, len(lines))
        self.assertIn("| 2x2, kept | 7 | 7 | 7.0 |", lines)
        self.assertIn("| hsdp | 7 | 7 | 7 | 50% |", lines)
        self.assertTrue(all(name.startswith("torch_stage3_") for name in values))

    def test_peer_ratio(self):
        name = "all_reduce 1 MiB, 4 ranks, shared memory: fastest peer / ours"
        for ours, verdict in ((10, "held"), (11, "MISSED")):
            with self.subTest(ours=ours):
                samples = samples_of((line(time_us=40), "impi"), (line(time_us=50), "openmpi"),
                                     (line(time_us=ours), "ours_shared"))
                claim = self.verdicts(samples)[name]
                self.assertAlmostEqual(40 / ours, claim.ratio)
                self.assertEqual(verdict, claim.verdict)

    def test_what_is_missing_is_not_measured(self):
        for claim in self.verdicts(claims.Samples()).values():
            self.assertEqual("not measured", claim.verdict)

    def test_sixteen_bit_counts_elements(self):
        size = 256 << 20
        samples = samples_of((line(size=size, time_us=100) +
                              line(size=size, dtype="bf16", time_us=110), "ours_shared"))
        claim = self.verdicts(samples, (size,))[
            "all_reduce 256 MiB, bf16: f32 / bf16, time per element"]
        self.assertAlmostEqual(200 / 110, claim.ratio)

    def test_four_ranks_against_two_counts_bytes(self):
        size = 16 << 20
        samples = samples_of((line(size=size, time_us=20) +
                              line(size=size, ranks=2, time_us=10), "ours_shared"))
        claim = self.verdicts(samples, (size,))[
            "all_reduce 16 MiB: 4 ranks / 2 ranks, time per byte moved"]
        self.assertAlmostEqual(1.0, claim.ratio)
        self.assertEqual("held", claim.verdict)

    def test_many_ranks_are_bound_by_time(self):
        for time_us, verdict in ((19_000, "held"), (21_000, "MISSED")):
            samples = samples_of((line(ranks=64, time_us=time_us), "ours_private"))
            claim = self.verdicts(samples)["all_reduce 1 MiB, 64 ranks, private memory: ms"]
            self.assertAlmostEqual(time_us / 1000, claim.ratio)
            self.assertEqual(verdict, claim.verdict)

    def test_idle_is_an_upper_bound(self):
        for percent, verdict in ((4.9, "held"), (5.1, "MISSED")):
            samples = samples_of((f"value idle_rank_cpu_percent {percent}\n", "ours_idle"))
            self.assertEqual(verdict, self.verdicts(samples)[
                "idle waiting rank, percent of a core"].verdict)

    def test_step(self):
        size = 256 << 20
        samples = samples_of((line(op="step", size=size, time_us=900), "openmpi_step"),
                             (line(op="step", size=size, time_us=600), "impi_step"),
                             (line(op="step", size=size, time_us=300) +
                              line(system="roofline", op="step", size=size, time_us=240),
                              "ours_step"))
        verdicts = self.verdicts(samples)
        peer = verdicts["Reducer step, f32 gradients: fastest peer / ours"]
        self.assertAlmostEqual(2.0, peer.ratio)
        self.assertEqual("impi_step/v", peer.detail)
        self.assertAlmostEqual(0.8, verdicts["Reducer step, f32 gradients: roofline / ours"].ratio)


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
