"""The Grafana dashboard asks for metrics and labels that a server exports, and leaves none of them out."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pageframe.api.metrics import FINISH_REASONS, Metrics

from .fakes import FakeEngine

Json = dict[str, Any]


@pytest.fixture(scope="module")
def dashboard() -> Json:
    loaded: Json = json.loads((files("pageframe.api.grafana") / "pageframe.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of every sample's name, as a server that has served something exports them."""
    engine = FakeEngine()
    engine.stats.num_blocks = 8
    engine.stats.num_waits = {"queue": 1, "blocks": 2}
    metrics = Metrics("tiny", engine.resolved, lambda: engine.stats)
    metrics.step(3)
    metrics.first_token(0.1, 5, queued_seconds=0.01, prefill_seconds=0.09)
    metrics.tokens(1, 0.01)
    metrics.completed(FINISH_REASONS[0], request_seconds=1.0, decode_seconds=0.9, num_tokens=3)
    metrics.refused()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def targets(dashboard: Json) -> list[Json]:
    return [target for panel in dashboard["panels"] for target in panel.get("targets", [])]


def names(text: str) -> list[str]:
    return re.findall(r"pageframe:\w+", text)


def test_each_expression_asks_for_what_is_exported(dashboard: Json, exported: dict[str, set[str]]) -> None:
    assert len(targets(dashboard)) > 20
    for target in targets(dashboard):
        expression = target["expr"]
        assert names(expression), f"{expression} asks for nothing of Pageframe's"
        for name in names(expression):
            assert name in exported, f"{expression}: no server exports {name}"
        known = set.union(*(exported[name] for name in names(expression)))
        selected = re.findall(r"[{,]\s*(\w+)\s*[=!]~?", expression)
        grouped = [label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")]
        shown = re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])
        assert {*selected, *grouped, *shown} <= known, f"{expression}: {known} are all labels there are"
        assert "model_name" in selected
        assert set(shown) <= set(grouped), f"{expression} sums away what {target['legendFormat']} shows"


def test_each_exported_metric_is_in_some_panel(dashboard: Json, exported: dict[str, set[str]]) -> None:
    asked = {name for target in targets(dashboard) for name in names(target["expr"])}
    assert set(exported) <= asked, f"in no panel: {sorted(set(exported) - asked)}"


def test_counters_are_asked_for_as_rates_and_gauges_are_not(dashboard: Json, exported: dict[str, set[str]]) -> None:
    for target in targets(dashboard):
        for name in names(target["expr"]):
            is_counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
            as_rate = f"rate({name}{{" in target["expr"]
            assert as_rate == is_counter, target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")


def test_quantiles_are_of_buckets_by_their_bounds(dashboard: Json) -> None:
    quantiles = [target["expr"] for target in targets(dashboard) if "histogram_quantile" in target["expr"]]
    assert quantiles
    for expression in quantiles:
        assert re.fullmatch(r"histogram_quantile\(0\.\d+, sum by \(le\) \(rate\(\S+_bucket{.*}\[.*\]\)\)\)", expression)


def test_the_model_variable_lists_models(dashboard: Json, exported: dict[str, set[str]]) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert set(variables) == {"datasource", "model_name"}
    (name,) = names(variables["model_name"]["definition"])
    assert "model_name" in exported[name]
    sources = {json.dumps(panel["datasource"]) for panel in dashboard["panels"] if panel["type"] != "row"}
    assert sources == {'{"type": "prometheus", "uid": "${datasource}"}'}


def test_panels_lie_beside_each_other(dashboard: Json) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
