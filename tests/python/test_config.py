"""What the user may set: checked when it is set, by names that can be guessed."""

from __future__ import annotations

import dataclasses

import pytest

import cccl
from cccl._rules import parse_bytes

ARTICLE = {
    "compression_type": "block_fp16_to_8bit",
    "sparsity_threshold": 0.5,
    "collective_filter": ["all_reduce"],
    "chunk_size": "auto",
}


@pytest.fixture(autouse=True)
def _restore_configuration():
    yield
    cccl.configure(cccl.Config(attach_ddp=False))


def test_the_articles_configuration_is_accepted():
    """F114: one plain dict."""
    config = cccl.configure(ARTICLE)
    assert cccl.current_config() is config
    assert [c.name for c in config.codecs] == ["block_float8", "block_float8"]
    assert config.collective_filter == ("all_reduce",)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("compresion_type", "compression_type"),
        ("compression", "compression_type"),
        ("blocksize", "block_size"),
        ("collective_filters", "collective_filter"),
        ("chunksize", "chunk_size"),
        ("non_finit", "non_finite"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(key, meant):
    """F114"""
    with pytest.raises(cccl.ConfigError, match=f"unknown key '{key}'; did you mean '{meant}'"):
        cccl.configure({key: 1})


def test_a_key_like_no_other_is_refused_with_all_names():
    with pytest.raises(cccl.ConfigError, match="allowed: compression_type, result_type"):
        cccl.configure({"qqq": 1})
    with pytest.raises(cccl.ConfigError):
        cccl.configure({3: 1})


BAD = {
    "compression_type": ["block_float9", "", None, 8, "NONE", "sparse()", "sparse(zip)"],
    "auto_codecs": [[], "block_float8", ["none"], ["auto"], ["identity"], ["zip"], [8]],
    "result_type": ["none", "zip", 4],
    "block_size": [0, 31, 33, 16, 2048, -128, 128.0, "128", True],
    "rounding": ["up", None, "Nearest"],
    "level": ["max", 3],
    "rotation": ["hadamar", True, None],
    "seed": [-1, 2**64, 1.5, "x", True],
    "collective_filter": ["all_reduce", ["all_to_all"], [1], None],
    "rules": ["*.bias", [5], ["*"], None, 3],
    "start_step": [-1, 1.5, "3", None, True],
    "schedule": ["none", [5], [[1, "zip"]], None],
    "spike_factor": [1, 0, -2, "2", True, float("inf"), float("nan")],
    "spike_type": ["auto", "zip", None, 8],
    "spike_steps": [0, -1, 1.5, True],
    "weights_type": ["zip", "block_float8", "cast_bf16", "sparse(block_float8)", 8, True],
    "sparsity_threshold": [-0.1, 1.1, "half", None, True, float("nan")],
    "top_k": [0, -0.1, 1.5, "all", True, float("nan")],
    "threshold": [0, -1, "small", True, float("inf"), float("nan")],
    "error_feedback": ["on", "auto", True, None, "owner"],
    "residual_type": ["int8", "float16", None, 8],
    "residual_decay": [0, -0.5, 1.5, "half", None, True, float("nan")],
    "chunk_size": [0, 4095, "4 elephants", "-1", "", None, 1.5, True, "2 KB"],
    "window": [0, 65, "two", 1.0, None, True],
    "algorithm": ["ring", None],
    "hierarchy": ["on", "", 0, -1, True, 1.5, None, [], [[]], [[0, 0]], [[-1]], [0]],
    "max_noise_share": [0, 1.01, -0.1, "small", True, float("nan")],
    "max_relative_error": [0, 1, -0.1, "small", True, float("nan")],
    "target_bits": [0, -4, 65, "few", True, float("nan")],
    "adaptive_codecs": [[], "block_float4", ["none"], ["auto"], ["block_float44"], None],
    "measure_every": [0, 1, -1, 8.0, "often", None, True],
    "checksum": ["yes", 1, None],
    "non_finite": ["ignore", None],
    "strict": ["true", 0, None],
    "deadline": [0, -1, "soon", True, float("nan")],
    "min_size": [-1, "4 elephants", "auto", None, 1.5, True],
    "nccl_lanes": [0, 9, "two", None, True],
    "nccl_max_ctas": [-1, 65, 1.5, True],
    "peer_memory": ["on", True, None],
    "debug": ["yes", 1, None],
    "attach_ddp": [1, None],
}


def test_every_field_is_tried_with_bad_values():
    assert BAD.keys() == {field.name for field in dataclasses.fields(cccl.Config)}


@pytest.mark.parametrize(
    ("key", "value"), [(k, v) for k, values in BAD.items() for v in values], ids=repr
)
def test_an_impossible_value_is_refused_by_key_value_and_what_is_allowed(key, value):
    """F114: and leaves the settings as they were."""
    before = cccl.configure(ARTICLE)
    with pytest.raises(cccl.ConfigError, match=key) as caught:
        cccl.configure({key: value})
    assert "allowed" in str(caught.value)
    assert repr(value).strip("[]") in str(caught.value)
    assert cccl.current_config() is before


GOOD = {
    "compression_type": [
        "none",
        "identity",
        "fp16",
        "bfloat16",
        "block_fp16_to_4bit",
        "sparse",
        "sparse(block_float8)",
        "sparse(block_fp16_to_4bit)",
    ],
    "result_type": [None, "block_float8", "identity"],
    "weights_type": [None, "none", "auto", "lossless", "sparse"],
    "block_size": [32, 1024],
    "rounding": ["nearest", "stochastic"],
    "level": ["fast", "best"],
    "rotation": ["none", "hadamard"],
    "seed": [0, 2**64 - 1],
    "collective_filter": [[], ["broadcast", "all_gather"], ("all_reduce",), {"all_reduce"}],
    "rules": [[], [{"name": "*.bias", "compression_type": "none"}]],
    "start_step": [0, 10**6],
    "schedule": [[], [[0, "none"], [5, "block_float8", "block_float4"]]],
    "spike_factor": [None, 2, 10.5],
    "spike_type": ["none", "block_float8"],
    "spike_steps": [1, 1000],
    "sparsity_threshold": [0, 1, 0.25],
    "top_k": [None, 1, 0.01],
    "threshold": [None, 1, 1e-30],
    "error_feedback": ["none", "sender", "both"],
    "residual_type": ["float32", "bfloat16", "block_float8"],
    "residual_decay": [1, 0.5, 1e-3],
    "chunk_size": ["auto", 4096, "4KiB", "2 MiB", "1MB", "8192"],
    "window": ["auto", 1, 64],
    "algorithm": ["auto", "two_shot", "one_shot"],
    "deadline": [None, 1, 0.5],
    "nccl_lanes": [1, 8],
    "nccl_max_ctas": [0, 64],
    "peer_memory": ["auto", "off"],
    "non_finite": ["propagate", "raise"],
}


@pytest.mark.parametrize(
    ("key", "value"), [(k, v) for k, values in GOOD.items() for v in values], ids=repr
)
def test_every_documented_value_is_accepted(key, value):
    cccl.configure({key: value, "attach_ddp": False})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"level": "best", "rounding": "stochastic"}, "rounding"),
        ({"compression_type": "sparse(sparse)"}, "inner = 'sparse'; allowed: a codec that holds"),
        ({"compression_type": "identity(sparse)"}, "'identity' has no option 'inner'"),
        ({"compression_type": "sparse", "rotation": "hadamard"}, "rotation = 'hadamard'"),
        ({"compression_type": "sparse(block_float8)", "rotation": "hadamard"}, "rotation"),
        ({"compression_type": "sparse", "top_k": 0.1, "threshold": 0.1}, "one of top_k and"),
        ({"compression_type": "none", "error_feedback": "both"}, "a codec named as compression_ty"),
        ({"compression_type": "auto", "error_feedback": "both"}, "a codec named as compression_ty"),
        ({"compression_type": "sparse", "error_feedback": "both"}, "a codec that loses something"),
        ({"compression_type": "identity", "result_type": "block_float8",
          "error_feedback": "sender"}, "a first leg that loses something"),
        ({"error_feedback": "both", "collective_filter": ["broadcast"]}, "all_reduce or reduce_sc"),
    ],
)  # fmt: skip
def test_combinations_that_no_codec_can_do_are_refused_when_they_are_set(settings, match):
    with pytest.raises(cccl.ConfigError, match=match):
        cccl.configure(settings)


@pytest.mark.parametrize("source", [5, 2.5, ["compression_type"], object()])
def test_a_source_of_another_type_is_refused(source):
    with pytest.raises(cccl.ConfigError, match="allowed: dict, Config, TOML path"):
        cccl.configure(source)


@pytest.mark.parametrize("section", ["", "[cccl]\n"])
def test_a_toml_file_sets_the_same(tmp_path, section):
    path = tmp_path / "cccl.toml"
    path.write_text(
        section + 'compression_type = "block_float4"\ncollective_filter = ["broadcast"]'
    )
    for source in (path, str(path)):
        config = cccl.configure(source)
        assert config.compression_type == "block_float4"
        assert config.collective_filter == ("broadcast",)
        assert cccl.configure(source, strict=True) == dataclasses.replace(config, strict=True)


def test_a_toml_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(cccl.ConfigError, match=r"missing\.toml"):
        cccl.configure(tmp_path / "missing.toml")
    for text in ("compression_type = ", 'cccl = "x"', '[cccl]\nlevle = "best"'):
        path = tmp_path / "broken.toml"
        path.write_text(text)
        with pytest.raises(cccl.ConfigError):
            cccl.configure(path)


def test_the_environment_sets_what_the_program_leaves_open(monkeypatch):
    monkeypatch.setenv("CCCL_COMPRESSION_TYPE", "block_float4")
    monkeypatch.setenv("CCCL_BLOCK_SIZE", "64")
    monkeypatch.setenv("CCCL_COLLECTIVE_FILTER", "all_reduce, broadcast")
    monkeypatch.setenv("CCCL_STRICT", "true")
    monkeypatch.setenv("CCCL_WINDOW", "3")
    monkeypatch.setenv("CCCL_DEADLINE", "2.5")
    monkeypatch.setenv("CCCL_CHUNK_SIZE", "1MiB")
    monkeypatch.setenv("CCCL_SPARSITY_THRESHOLD", "0.25")
    config = cccl.configure({"block_size": 256})
    assert config.compression_type == "block_float4"
    assert config.block_size == 256, "what the program says wins"
    assert config.collective_filter == ("all_reduce", "broadcast")
    assert (config.strict, config.window, config.deadline) == (True, 3, 2.5)
    assert (config.chunk_bytes, config.sparsity_threshold) == (1 << 20, 0.25)
    assert cccl.configure().block_size == 64


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CCCL_BLOCK_SIZE", "big"),
        ("CCCL_BLOCK_SIZE", "100"),
        ("CCCL_STRICT", "maybe"),
        ("CCCL_WINDOW", "wide"),
        ("CCCL_DEADLINE", "soon"),
        ("CCCL_COMPRESSION_TYPE", "zip"),
        ("CCCL_COLLECTIVE_FILTER", "all_reduce,all_to_all"),
        ("CCCL_CHUNK_SIZE", "tiny"),
    ],
)
def test_an_impossible_value_in_the_environment_is_refused(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(cccl.ConfigError, match="allowed"):
        cccl.configure({})


def test_a_misspelt_variable_is_pointed_out_and_those_of_others_are_not(monkeypatch):
    monkeypatch.setenv("CCCL_BLOK_SIZE", "64")
    monkeypatch.setenv("CCCL_ENABLE_TESTING", "ON")  # NVIDIA's CMake project has such names
    with pytest.warns(UserWarning, match="did you mean CCCL_BLOCK_SIZE") as caught:
        cccl.configure({})
    assert len(caught) == 1


def test_keywords_go_over_a_dict_and_a_config():
    base = cccl.Config(compression_type="block_float4", block_size=64)
    config = cccl.configure(base, block_size=32)
    assert (config.compression_type, config.block_size) == ("block_float4", 32)
    assert cccl.configure({"block_size": 64}, block_size=512).block_size == 512
    assert cccl.configure(strict=True).strict


def test_a_config_cannot_be_changed_behind_the_librarys_back():
    config = cccl.Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 64


def test_options_reach_a_codec_within_another():
    config = cccl.Config(compression_type="sparse(block_float3)", result_type="sparse",
                         block_size=64, sparsity_threshold=0.25, top_k=0.01)  # fmt: skip
    inner = "block_float3(block_size=64, rounding=nearest, level=fast)"
    assert [codec.spec for codec in config.codecs] == [
        f"sparse(inner={inner}, sparsity_threshold=0.25, top_k=0.01)",
        "sparse(inner=identity, sparsity_threshold=0.25, top_k=0.01)",
    ]


def test_options_reach_the_codecs_that_have_them():
    config = cccl.Config(compression_type="block_float4", result_type="cast_bf16",
                         block_size=64, level="best")  # fmt: skip
    first, second = config.codecs
    assert first.spec == "block_float4(block_size=64, rounding=nearest, level=best)"
    assert second.name == "cast_bf16"
    assert cccl.Config(compression_type="none").codecs is None


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("2KiB", 2048), ("3 MB", 3_000_000), ("1gib", 1 << 30)]
)
def test_sizes_may_have_units(text, value):
    assert parse_bytes(text) == value


def test_a_broken_toml_file_is_called_that(tmp_path):
    (tmp_path / "broken.toml").write_text("compression_type = ")
    with pytest.raises(cccl.ConfigError, match="no valid TOML"):
        cccl.configure(tmp_path / "broken.toml")


def test_auto_chooses_among_safe_codecs_unless_told_otherwise():
    config = cccl.Config(compression_type="auto")
    assert list(config.candidates) == ["block_float8"]
    assert config.compresses and config.codecs is None
    named = cccl.Config.load({"compression_type": "auto", "auto_codecs": ["block_float4"]})
    assert named.candidates["block_float4"].codecs[0].name == "block_float4"
    assert cccl.Config().candidates == {}


def test_auto_codecs_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("CCCL_COMPRESSION_TYPE", "auto")
    monkeypatch.setenv("CCCL_AUTO_CODECS", "block_float8, block_float4")
    assert list(cccl.Config.load(None).candidates) == ["block_float8", "block_float4"]


def test_error_feedback_has_the_legs_that_lose_something():
    def legs(**settings):
        found = cccl.Config(**settings).feedback
        return found and (found.sender, found.owner)

    assert legs(error_feedback="both") == (True, True)
    assert legs(error_feedback="sender") == (True, False)
    assert legs(error_feedback="both", result_type="identity") == (True, False)
    assert legs(error_feedback="both", compression_type="identity", result_type="fp16") == (
        False,
        True,
    )
    assert legs() is legs(error_feedback="none") is legs(compression_type="none") is None


def test_settings_of_residuals_that_there_are_not_are_pointed_out():
    cccl.configure({"residual_decay": 0.5, "attach_ddp": False})
    assert "residual_decay has no effect: there is no error feedback" in cccl.report()
    cccl.configure({"residual_decay": 0.5, "error_feedback": "both", "attach_ddp": False})
    assert "no effect" not in cccl.report()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "none"),
        ({"compression_type": "auto"}, "auto"),
        ({"compression_type": "auto", "weights_type": "none"}, "none"),
        ({"compression_type": "none", "weights_type": "lossless"}, "lossless"),
        ({"weights_type": "auto"}, "auto"),
        ({"weights_type": "lossless", "error_feedback": "both"}, "lossless"),
        ({"weights_type": "lossless", "collective_filter": ["broadcast"]}, "filter"),
    ],
    ids=str,
)
def test_weights_lose_no_bit_unless_the_filter_names_their_collective(settings, expected):
    config = cccl.Config(**settings)
    found = config.of("broadcast")
    assert config.of("all_reduce") is config
    if expected in ("none", "filter"):
        assert found is config
        assert ("broadcast" in config.collective_filter) == (expected == "filter")
    else:
        assert found.compression_type == expected
        assert found.of("broadcast") is found
        assert {*found.candidates} == ({"lossless"} if expected == "auto" else set())
        codecs = found.codecs or found.candidates["lossless"].codecs
        assert all(codec.lossless for codec in codecs)


def test_the_level_reaches_lossless():
    (codec, _) = cccl.Config(weights_type="lossless", level="best").of("all_gather").codecs
    assert codec.spec == "lossless(level=best)"
