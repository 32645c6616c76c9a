from __future__ import annotations

import pytest

from evaluation.analysis import plots
from evaluation.analysis.comparison import Point, by_point, gain, in_order, lone_points, metrics, shared_points
from evaluation.analysis.plots import CurvePoint, write_run_curves
from evaluation.grid import Cell
from tests.evaluation.synthetic import make_cell

OWN, ZERO = Point("compactionrl", 512, 3, 1, 1.0), Point("compactionrl", 512, 0, None, 1.0)


def cell(probability: float, *, seed: int = 0, repeats: int = 1, n_tasks: int = 100, run: str | None = None):
    made = make_cell(Cell("compactionrl", seed, 512, 3, 1), probability, n_tasks=n_tasks, repeats=repeats)
    return made.model_copy(update={"mlflow_run_id": run})


def test_cells_of_all_seeds_are_one_point() -> None:
    points = by_point([cell(0.5, seed=0), cell(0.5, seed=1), make_cell(Cell("compactionrl", 0, 512, 0, None), 0.1)])
    assert {point: len(cells) for point, cells in points.items()} == {OWN: 2, ZERO: 1}
    assert (OWN.setting, ZERO.setting) == ("window 512 · cap 3 · keep 1", "window 512 · cap 0")
    assert Point("base", 65_536, 3, 2, 0.0).setting == "window 64k · cap 3 · keep 2 · greedy"
    assert Point("base", 512, 0, None, 0.7).setting == "window 512 · cap 0 · temperature 0.7"


def test_points_of_two_runs_are_shared_and_those_of_one_are_alone() -> None:
    greedy, base = Point("compactionrl", 512, 3, 1, 0.0), Point("base", 512, 3, 1, 1.0)
    a, b, c = ({p: [] for p in points} for points in ([OWN, ZERO], [OWN, greedy], [greedy, base]))
    assert shared_points([a, b, c]) == [OWN, greedy]
    assert lone_points({"A": a, "B": b, "C": c}) == {"A": [ZERO], "C": [base]}
    assert in_order([greedy, OWN, ZERO, base]) == [base, ZERO, OWN, greedy]


def test_metrics_are_pooled_over_seeds() -> None:
    found = metrics([cell(0.8, seed=1), cell(0.4, seed=0)])
    assert found.seeds == (0, 1)
    assert found.pass_at_1 == pytest.approx(0.6)
    assert found.interval is not None
    assert found.interval.low < 0.6 < found.interval.high
    assert (found.scored, found.trials) == (200, 200)


def test_seeds_in_common_are_paired_with_themselves() -> None:
    reference = [cell(0.4, seed=0), cell(0.4, seed=1)]
    found = gain([cell(0.9, seed=1), cell(0.1, seed=2)], reference)
    assert found.seeds == (1,)
    assert found.tasks == 100
    assert found.comparison.difference == pytest.approx(0.5)
    assert found.comparison.test == "mcnemar"


def test_one_seed_of_the_reference_serves_seeds_that_it_lacks() -> None:
    found = gain([cell(0.9, seed=1), cell(0.7, seed=2)], [cell(0.4, seed=0)])
    assert (found.seeds, found.tasks, found.comparison.n_tasks) == ((1, 2), 100, 200)
    assert found.comparison.difference == pytest.approx(0.4)


def test_repeats_are_tested_by_their_tasks_means_on_common_tasks() -> None:
    found = gain([cell(0.9, repeats=3, n_tasks=60)], [cell(0.4)])
    assert found.comparison.test == "sign-flip"
    assert (found.tasks, found.comparison.n_only_one) == (60, 40)


def test_a_reused_evaluation_is_known_by_the_run_that_made_it() -> None:
    assert gain([cell(0.5, run="x")], [cell(0.5, run="x")]).same_trials
    assert not gain([cell(0.5, run="x")], [cell(0.5, run="y")]).same_trials
    assert not gain([cell(0.5)], [cell(0.5)]).same_trials


def curve(variant: str, *rewards: float) -> list[CurvePoint]:
    return [CurvePoint(variant, 0, step, {plots.REWARD: reward}) for step, reward in enumerate(rewards, start=1)]


def test_curves_of_runs_are_one_picture(tmp_path) -> None:
    runs = {"A": curve("compactionrl", 0.1, 0.4), "B": curve("supo", 0.1, 0.5, 0.6), "C": []}
    path = write_run_curves(tmp_path / "curves.png", runs, [(plots.REWARD, "reward"), (plots.SUMMARY_TOKENS, "tokens")])
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert write_run_curves(tmp_path / "none.png", {"A": []}, [(plots.REWARD, "reward")]) is None
    assert not (tmp_path / "none.png").exists()


def test_every_variant_looks_different() -> None:
    from evaluation.analysis.tables import VARIANT_ORDER

    looks = [plots.look(variant) for variant in (*VARIANT_ORDER, "of the user's own")]
    for values in zip(*((look.colour, look.marker, look.glyph) for look in looks), strict=True):
        assert len(set(values)) == len(looks)
