"""Rules and schedules: what they may be, and which one decides."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest

import cccl
from cccl._by_parameter import Rule, first_match, unmatched

NORMS = {"name": ["*norm*", "*.bias"], "compression_type": "block_float8"}
SHAPES = {
    ("tokens.weight", "head.weight"): (256, 64),
    ("blocks.0.attention_norm.weight",): (64,),
    ("blocks.0.qkv.weight",): (192, 64),
    ("blocks.0.qkv.bias",): (192,),
    ("scale",): (),
}


@pytest.fixture(autouse=True)
def _restore_configuration():
    yield
    cccl.configure(cccl.Config(attach_ddp=False))


def decided(*rules: dict) -> list[int | None]:
    numbered = list(enumerate(cccl.Config.load({"rules": list(rules)}).rules))
    return [first_match(numbered, names, shape) for names, shape in SHAPES.items()]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"name": "*.bias"}, [None, None, None, 0, None]),
        ({"name": "re:blocks\\.\\d+\\.(qkv|projection)\\..*"}, [None, None, 0, 0, None]),
        ({"name": "re:qkv"}, [None] * 5),  # the whole name
        ({"name": ["head.*", "scale"]}, [0, None, None, None, 0]),  # of tied weights, any name
        ({"max_ndim": 1}, [None, 0, None, 0, 0]),
        ({"min_ndim": 2}, [0, None, 0, None, None]),
        ({"min_ndim": 1, "max_numel": 64}, [None, 0, None, None, None]),
        ({"min_numel": 12289}, [0, None, None, None, None]),
        ({"name": "blocks.*", "max_ndim": 1, "min_numel": 100}, [None, None, None, 0, None]),
    ],
    ids=str,
)
def test_a_rule_is_of_what_meets_all_its_conditions(condition, expected):
    assert decided({**condition, "compression_type": "none"}) == expected


def test_the_first_rule_that_matches_decides():
    rules = [NORMS, {"max_ndim": 1, "compression_type": "none"},
             {"name": "*", "compression_type": "block_float6"}]  # fmt: skip
    assert decided(*rules) == [2, 0, 2, 0, 1]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"nmae": "*", "compression_type": "none"}, r"rules\[1\]: unknown key 'nmae'; did you mean "
         "'name'"),
        ({"compresion_type": "none"}, "did you mean 'compression_type'"),
        ({"zzz": 1, "compression_type": "none"}, "allowed: compression_type, result_type, name"),
        ({"name": "*"}, r"rules\[1\]: compression_type is missing; allowed: none, or"),
        ({"compression_type": "none"}, "it has no condition"),
        ({"name": "*", "compression_type": "zip"}, "compression_type = 'zip'; allowed"),
        ({"name": "*", "compression_type": "auto"}, "compression_type = 'auto'; allowed"),
        ({"name": "re:(", "compression_type": "none"}, r"name = \('re:\(',\); allowed"),
        ({"name": 3, "compression_type": "none"}, "name = 3; allowed"),
        ({"max_ndim": -1, "compression_type": "none"}, "max_ndim = -1; allowed"),
        ({"min_numel": 1.5, "compression_type": "none"}, "min_numel = 1.5; allowed"),
        ({"collective": "allreduce", "compression_type": "none"}, "collective = 'allreduce'; all"),
        ({"collective": "all_gather", "name": "*", "compression_type": "none"}, "beside name"),
        ({"name": "*", "compression_type": "none", "result_type": "block_float8"},
         "result_type needs a comp"),
        ({"name": "*", "compression_type": "none", "start_step": -1}, "start_step = -1; allowed"),
        ({"name": "*", "compression_type": "none", "schedule": [[5, "zip"]]}, "schedule = .*zip"),
        ("*.bias", r"rules\[1\] = '\*.bias'; allowed"),
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_that_cannot_be_is_refused_by_number_key_and_value(rule, message):
    with pytest.raises(cccl.ConfigError, match=message):
        cccl.configure({"rules": [NORMS, rule]})


def test_rules_of_parameters_need_the_collective_of_their_gradients():
    with pytest.raises(cccl.ConfigError, match=r"beside rules of parameters.*add 'all_reduce'"):
        cccl.configure({"rules": [NORMS], "collective_filter": ["reduce_scatter"]})
    by_rule = {"collective": "all_reduce", "compression_type": "block_float8"}
    cccl.configure({"rules": [NORMS, by_rule], "collective_filter": ["reduce_scatter"]})


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("*.bais", "blocks.0.qkv.bias"),
        ("blocks.*.atention_norm.*", "blocks.0.attention_norm.weight"),
        ("re:blocks\\.\\d+\\.qvk\\.weight", "blocks.0.qkv.weight"),
        ("toknes.weight", "tokens.weight"),
    ],
)
def test_a_rule_that_matches_nothing_is_told_with_the_nearest_names(pattern, nearest):
    (text,) = unmatched([(3, Rule("none", name=pattern))], SHAPES)
    assert text.startswith("rules[3] (name = ") and "matches no parameter; nearest names: " in text
    assert nearest in text


def test_a_rule_behind_others_that_have_all_it_matches_is_told():
    rules = [(0, Rule("none", max_ndim=1)), (1, Rule("block_float8", name="*.bias"))]
    assert unmatched(rules, SHAPES) == [
        "rules[1] (name = ('*.bias',)) decides nothing: earlier rules have all that it matches"
    ]
    assert unmatched(rules[:1], SHAPES) == []


SCHEDULE = {
    "compression_type": "block_float4",
    "start_step": 10,
    "schedule": [[20, "block_float8"], [30, "block_float3", "block_float6"], [40, "none"]],
    "rules": [
        {**NORMS, "start_step": 15},
        {"name": "x", "compression_type": "block_float5", "schedule": [[25, "cast_bf16"]]},
        {"collective": "all_gather", "compression_type": "block_float8"},
    ],
}


@pytest.mark.parametrize(
    ("step", "base", "first", "second"),
    [
        (0, ("none",), ("none",), ("none",)),
        (9, ("none",), ("none",), ("none",)),
        (10, ("block_float4",), ("none",), ("block_float5",)),
        (15, ("block_float4",), ("block_float8",), ("block_float5",)),
        (20, ("block_float8",), ("block_float8",), ("block_float5",)),
        (25, ("block_float8",), ("block_float8",), ("cast_bf16",)),
        (39, ("block_float3", "block_float6"), ("block_float8",), ("cast_bf16",)),
        (10**9, ("none",), ("block_float8",), ("cast_bf16",)),
    ],
)
def test_steps_decide_on_codecs(step, base, first, second):
    ways = cccl.Config.load(SCHEDULE).ways
    for rule, expected in ((None, base), (0, first), (1, second)):
        found = ways.at(step, rule)
        assert (found.compression_type, found.result_type) == (*expected, None)[:2]
        assert found.ways is None
        assert ways.at(step, rule) is found


def test_a_phase_is_as_long_as_nothing_changes():
    ways = cccl.Config.load(SCHEDULE).ways
    for step in range(50):
        same = all(ways.at(step, r) is ways.at(step + 1, r) for r in (None, 0, 1))
        assert same or ways.phase(step) != ways.phase(step + 1)
    assert ways.phase(25) == ways.phase(29)


@pytest.mark.parametrize(
    "schedule",
    [
        "none", [5], [[1]], [["1", "none"]], [[-1, "none"]], [[2, "none"], [2, "block_float8"]],
        [[3, "none"], [2, "none"]], [[1, "auto"]], [[1, "none", "block_float8"]],
        [[1, "block_float8", "none"]], [[1, "block_float8", "cast_bf16", "x"]], [[True, "none"]],
    ],
    ids=str,
)  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused(schedule):
    with pytest.raises(cccl.ConfigError, match=r"schedule = .*allowed: a list of"):
        cccl.configure({"schedule": schedule})


def test_without_rules_or_steps_there_is_nothing_to_decide():
    assert cccl.Config().ways is None
    by_operation = {"collective": "reduce_scatter", "compression_type": "block_float4"}
    assert cccl.Config.load({"rules": [by_operation]}).ways is None


def test_a_rule_of_a_collective_is_the_settings_of_that_one():
    config = cccl.Config.load({
        "compression_type": "block_float4",
        "rules": [
            {"collective": "all_gather", "compression_type": "block_float8"},
            {"collective": "reduce_scatter", "compression_type": "block_float6",
             "result_type": "block_float8"},
            NORMS,
        ],
    })  # fmt: skip
    names = [codec.name for codec in config.of("reduce_scatter").codecs]
    assert names == ["block_float6", "block_float8"]
    gathered = config.of("all_gather")
    assert gathered.codecs[0].name == "block_float8" and "all_gather" in gathered.collective_filter
    assert config.of("all_gather") is gathered and gathered.of("all_gather") is gathered
    assert config.of("all_reduce") is config
    assert "broadcast" not in config.of("broadcast").collective_filter, "nobody asked for it"


def test_operations_default_to_lossy_gradients_and_plain_weights():
    config = cccl.Config(compression_type="block_float4")
    assert {c for c in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
            if config.reaches(c)} == {"all_reduce", "reduce_scatter"}  # fmt: skip
    asked = cccl.Config(compression_type="block_float4", collective_filter=("broadcast",))
    assert asked.reaches("broadcast") and not asked.reaches("all_reduce")
    later = cccl.Config(compression_type="none", schedule=((5, "block_float8"),))
    assert later.reaches("all_reduce") and not later.compresses


def test_rules_come_from_toml_environment_and_another_configuration(tmp_path, monkeypatch):
    (tmp_path / "cccl.toml").write_text(
        '[cccl]\ncompression_type = "block_float4"\nschedule = [[100, "block_float3"]]\n'
        '[[cccl.rules]]\nname = ["*.bias", "*norm*"]\ncompression_type = "none"\n'
    )
    config = cccl.configure(str(tmp_path / "cccl.toml"))
    assert config.rules == (Rule("none", name=("*.bias", "*norm*")),)
    assert config.schedule == ((100, "block_float3"),)
    assert cccl.configure(config, window=4).rules == config.rules
    monkeypatch.setenv("CCCL_RULES", '[{"max_ndim": 1, "compression_type": "none"}]')
    monkeypatch.setenv("CCCL_SCHEDULE", '[[7, "block_float8"]]')
    monkeypatch.setenv("CCCL_START_STEP", "3")
    config = cccl.Config.load({})
    assert config.rules == (Rule("none", max_ndim=1),)
    assert (config.schedule, config.start_step) == (((7, "block_float8"),), 3)
    monkeypatch.setenv("CCCL_RULES", "[{")
    with pytest.raises(cccl.ConfigError, match=r"CCCL_RULES = .*allowed: a list of tables"):
        cccl.Config.load({})


def test_a_way_that_loses_nothing_has_no_feedback():
    config = cccl.Config.load({"compression_type": "block_float4", "error_feedback": "both",
                               "rules": [{**NORMS, "compression_type": "none"}]})  # fmt: skip
    assert config.ways.at(0).feedback is not None
    assert config.ways.at(0, 0).feedback is None
    late = {"compression_type": "none", "error_feedback": "both"}
    with pytest.raises(cccl.ConfigError, match="a codec named as compression_type"):
        cccl.Config.load(late)
    late = cccl.Config.load({**late, "schedule": [[1, "block_float2"]]})
    assert late.ways.at(0).feedback is None and late.ways.at(1).feedback is not None


MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
"""


def test_the_command_shows_which_parameter_goes_how(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cccl.toml").write_text(
        'compression_type = "block_float4"\nresult_type = "block_float8"\nstart_step = 2\n'
        '[[rules]]\nmax_ndim = 1\ncompression_type = "block_float8"\n'
        '[[rules]]\nname = "1.wieght"\ncompression_type = "none"\n'
    )

    def run(*more: str, entry: str = "model.py:make") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cccl", "rules", entry, "--config", "cccl.toml", *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    shown = run("--step", "2", "--json")
    assert shown.returncode == 0, shown.stderr
    assert "nearest names: 1.weight" in shown.stderr
    rows = json.loads(shown.stdout)
    assert [row["codec"] for row in rows] == ["block_float4 -> block_float8", *["block_float8"] * 3]
    assert rows[0] == {"parameter": "0.weight", "shape": "3 x 4", "rule": "-",
                       "codec": "block_float4 -> block_float8"}  # fmt: skip
    assert rows[1]["rule"] == "rules[0] (max_ndim = 1)"
    table = run()
    assert table.stdout.count(" none\n") == 4, "before start_step"
    assert "returned a module" in run(entry="torch:version").stderr or run(
        entry="builtins:dict"
    ).stderr.startswith("error: entry 'builtins:dict' returned a dict")


def test_explain_warns_as_training_would():
    torch = pytest.importorskip("torch")
    import cccl.torch

    model = torch.nn.Linear(4, 3)
    with pytest.warns(
        UserWarning, match=r"rules\[0\] .* matches no parameter; nearest names: bias"
    ):
        text = cccl.torch.explain(model, {"rules": [{"name": "bais", "compression_type": "none"}]})
    assert text.splitlines()[1].split()[-1] == "block_float8"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cccl.torch.explain(model, {"rules": [{"name": "b*", "compression_type": "none"}]})
    with pytest.raises(cccl.ConfigError, match="step = -1"):
        cccl.torch.explain(model, step=-1)
