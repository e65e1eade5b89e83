"""Configuration sources: precedence, errors with key, source and allowed values, secrets, round
trip."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_serve.config.keys import check_engine_config, config_keys
from moe_serve.config.sections import (
    CacheConfig,
    Config,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from moe_serve.config.sources import LoadedConfig, describe, load_config, variable_name
from moe_serve.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def load(
    yaml_file: Path | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
) -> LoadedConfig:
    return load_config(flags=flags or {}, environ=environ or {}, file=yaml_file)


def source_of(loaded: LoadedConfig, path: str) -> str:
    (entry,) = (entry for entry in describe(loaded) if entry.key.path == path)
    return entry.source


WriteYaml = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteYaml:
    def write_yaml(text: str) -> Path:
        path = tmp_path / "serve.yaml"
        path.write_text(text, "utf-8")
        return path

    return write_yaml


def test_nothing_set_gives_the_defaults() -> None:
    loaded = load()
    assert loaded.config == Config()
    assert {entry.source for entry in loaded.entries} == {"default"}


def test_flag_over_environment_over_file_over_default(write: WriteYaml) -> None:
    file = write("server:\n  port: 1\n  host: ::1\nscheduler:\n  max_num_seqs: 7\n")
    environ = {"MOE_SERVE_SERVER_PORT": "2", "MOE_SERVE_SCHEDULER_MAX_NUM_SEQS": "8"}
    loaded = load(file, environ, {"server.port": 3})
    assert loaded.config.server.port == 3
    assert loaded.config.engine.scheduler.max_num_seqs == 8
    assert loaded.config.server.host == "::1"
    assert loaded.config.server.is_strict is True
    assert source_of(loaded, "server.port") == "command line"
    assert source_of(loaded, "scheduler.max_num_seqs") == "MOE_SERVE_SCHEDULER_MAX_NUM_SEQS"
    assert source_of(loaded, "server.host") == f"{file}:3"
    assert source_of(loaded, "server.is_strict") == "default"


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ("'on'", "on")])
def test_on_and_off_need_no_quotes(write: WriteYaml, text: str, value: str) -> None:
    """YAML reads on and off as booleans."""
    loaded = load(write(f"model:\n  cuda_graphs: {text}\n"))
    assert loaded.config.engine.model.cuda_graphs == value
    again = load(write(loaded.to_yaml()))
    assert again.config == loaded.config
    environ = {"MOE_SERVE_MODEL_CUDA_GRAPHS": value}
    assert load(environ=environ).config.engine.model.cuda_graphs == value


def test_off_needs_no_quotes_where_there_is_no_on(write: WriteYaml) -> None:
    assert load(write("cluster:\n  rebalance: off\n")).config.engine.cluster.rebalance == "off"
    with pytest.raises(ConfigError, match=r"cluster\.rebalance cannot be 'on' .*manual, auto"):
        load(write("cluster:\n  rebalance: on\n"))


def test_live_balancing_needs_ranks_to_balance(write: WriteYaml) -> None:
    ranks = "  attention_ranks: 1\n  expert_ranks: 1\n"
    with pytest.raises(ConfigError, match="is 'auto', but 1 expert ranks have nothing to balance"):
        load(write(f"cluster:\n{ranks}  rebalance: auto\n"))
    file = write(
        f"cluster:\n{ranks.replace('expert_ranks: 1', 'expert_ranks: 2')}"
        "  rebalance: auto\n  rebalance_bytes_per_s: 2MiB\n"
    )
    assert load(file).config.engine.cluster.rebalance_bytes_per_s == 2 * 2**20


def test_the_file_may_be_named_by_the_environment(write: WriteYaml) -> None:
    file = write("pipeline: {micro_batches: 2}\n")
    loaded = load(environ={"MOE_SERVE_CONFIG": str(file)})
    assert loaded.config.engine.pipeline.micro_batches == 2


def test_every_key_has_its_own_variable() -> None:
    names = [variable_name(key) for key in config_keys()]
    assert len(set(names)) == len(names)
    assert "MOE_SERVE_CACHE_NUM_PAGES" in names
    assert not {"MOE_SERVE_CONFIG", "MOE_SERVE_API_KEY"} & set(names)


def test_variables_are_parsed_by_the_type_of_the_key() -> None:
    loaded = load(
        environ={
            "MOE_SERVE_MODEL_MAX_MODEL_LEN": "none",
            "MOE_SERVE_MODEL_DTYPE": "float32",
            "MOE_SERVE_MODEL_PATH": "",
            "MOE_SERVE_CACHE_MEMORY_BYTES": "2GiB",
            "MOE_SERVE_SERVER_IS_STRICT": "off",
            "MOE_SERVE_SERVER_DRAIN_TIMEOUT_S": "5",
            "MOE_SERVE_SERVER_API_KEYS": "a, b",
        }
    )
    assert loaded.config.engine.model == ModelConfig(dtype="float32")
    assert loaded.config.engine.cache == CacheConfig(memory_bytes=2**31)
    assert loaded.config.server.is_strict is False
    assert loaded.config.server.drain_timeout_s == 5.0
    assert loaded.config.server.api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a", ("a",)),
        ("a,b", ("a", "b")),
        ('["a"]', ("a",)),
        (' [ "a" , "b,c", "[d]" ] ', ("a", "b,c", "[d]")),
        ("[]", ()),
    ],
)
@pytest.mark.parametrize("name", ["API_KEYS", "ADMIN_KEYS", "ALLOWED_HOSTS", "CORS_ORIGINS"])
def test_a_list_in_a_variable_has_commas_or_is_json(
    name: str, text: str, values: tuple[str, ...]
) -> None:
    server = load(environ={f"MOE_SERVE_SERVER_{name}": text}).config.server
    assert getattr(server, name.lower()) == values


@pytest.mark.parametrize(
    "text", ["[secret]", '["secret"', "['secret']", '["secret", 1]', "[", "[{}]"]
)
def test_what_begins_as_a_json_list_must_be_one(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"server.api_keys cannot be this value \(not shown\)"
    ) as e:
        load(environ={"MOE_SERVE_SERVER_API_KEYS": text})
    assert "secret" not in str(e.value) and "list" in str(e.value)
    with pytest.raises(ConfigError, match=r"'\[a' .*ALLOWED_HOSTS\).* write one,two or"):
        load(environ={"MOE_SERVE_SERVER_ALLOWED_HOSTS": "[a"})


# Each list holds the one before twice: read as a tree, a quarter of a million numbers.
BOMB = functools.reduce(lambda s, i: f"&a{i} [{s}, *a{i - 1}]", range(1, 18), "&a0 [1, 1]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:\n  prot: 1\n", r"unknown key server.prot \(.*:2\): did you mean server.port\?"),
        ("sever:\n  port: 1\n", r"unknown section sever \(.*:1\): did you mean server\?"),
        (
            "engine:\n  x: 1\n",
            r"unknown section engine .* known are adapters, cache, cells, cluster, kv_events",
        ),
        ("server:\n  port: '80'\n", r"server.port cannot be '80' \(.*:2\): .*\[0, 65535\]"),
        ("server:\n  port: 65536\n", r"server.port cannot be 65536"),
        ("server:\n  port: true\n", r"server.port cannot be True"),
        ("server:\n  port: null\n", r"server.port cannot be null"),
        ("server:\n  port: ~\n", r"server.port cannot be null \(.*:2\)"),
        ("server:\n  port: 1:30\n", r"server.port cannot be '1:30' \(.*serve.yaml:2\): .*\[0,"),
        ("server:\n  sse_ping_s: 1:30\n", r"server.sse_ping_s cannot be '1:30' \(.*:2\)"),
        ("server:\n  port: 0o17\n", r"server.port cannot be '0o17' \(.*:2\)"),
        ("server:\n  port: 017\n", r"server.port cannot be '017' \(.*:2\)"),
        ("server:\n  port: 0b11\n", r"server.port cannot be '0b11' \(.*:2\)"),
        ("server:\n  port: 80_0\n", r"server.port cannot be '80_0' \(.*:2\)"),
        ("server:\n  port: !!int '1:30'\n", r"not a plain value \(.*:2\): it has the tag !!int;"),
        (
            "server:\n  host: !!binary aGk=\n",
            r"not a plain value \(.*:2\): it has the tag !!binary",
        ),
        ("server:\n  api_keys: !!set {a}\n", r"not a plain value \(.*:2\): it has the tag !!set"),
        ("server:\n  served_model_name: 12\n", r"cannot be 12 \(.*:2\): .* number in quotes"),
        ("server:\n  ? [a]\n  : 1\n", r"a key must be one word, not a list or a mapping \(.*:2\)"),
        (f"server:\n  port: {'9' * 5000}\n", r"server.port cannot be '9{79}\.\.\. \(.*:2\)"),
        (f"server:\n  sse_ping_s: {'9' * 400}\n", r"sse_ping_s cannot be '9{79}\.\.\. \(.*:2\)"),
        (f"server:\n  sse_ping_s: 9e{'9' * 400}\n", r"9e9{78}\.\.\. is too large for a number"),
        (f"server:\n  max_body_bytes: {'9' * 5000}MiB\n", r"max_body_bytes cannot be '9{79}\.\.\."),
        ("server:\n  is_strict: 1\n", r"server.is_strict cannot be 1 .* true or false"),
        ("server:\n  api_keys: abc\n", r"server.api_keys cannot be this value \(not shown\)"),
        ("server:\n  api_keys: ['a b']\n", r"it takes a list of non-empty strings"),
        ("server:\n  sse_ping_s: .nan\n", r"server.sse_ping_s cannot be nan"),
        ("server:\n  max_body_bytes: 4MB\n", r"a size such as 512MiB"),
        ("pipeline:\n  micro_batches: 5\n", r"micro_batches cannot be 5 .* in \[1, 4\]"),
        ("model:\n  dtype: fp32\n", r"model.dtype cannot be 'fp32' .* auto, float32, bfloat16"),
        ("model:\n  path: ''\n", r"model.path cannot be '' .* or null"),
        ("scheduler:\n  max_num_seqs: 1.0\n", r"max_num_seqs cannot be 1.0 .* an integer"),
        ("cache:\n  num_pages: 1\n  memory_bytes: 2\n", r"num_pages \(1\) and .* \(2\) both set"),
        ("server:\n  port: 1\n  port: 2\n", r"server\.port is set twice \(.*:3\)"),
        ("- a\n", r"the file must hold `name: value` lines \(.*:1\)"),
        ("server: 3\n", r"the section server must hold `name: value` lines"),
        ("server: [\n", r"is not valid YAML: .* line 2"),
        ("!!python/object/apply:os.getpid []\n", r"this is not a plain value \(.*:1\)"),
        ("model:\n  path: !!python/name:os.getpid\n", r"this is not a plain value \(.*:2\)"),
        (
            "server:\n  host: " + BOMB,
            r"the aliases of .* repeat [\d,]+ values; at most 100,000 are",
        ),
        ("server:\n  host: &a [*a]\n", r"stands for a value that contains it \(.*:2\)"),
        ("server:\n  host: " + "[" * 150 + "]" * 150, r"are nested more than 100 deep"),
        ("server:\n  host: " + "[" * 3000, r"nested too deeply to be read"),
    ],
)
def test_a_wrong_file_is_refused(write: WriteYaml, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(text))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("server.served_model_name", "on", "on"),
        ("server.served_model_name", "2026-01-02", "2026-01-02"),
        ("server.served_model_name", "1:30", "1:30"),
        ("server.served_model_name", "=", "="),
        ("server.served_model_name", "!!str 12", "12"),
        ("server.served_model_name", "~", None),
        ("server.api_keys", "[0123, no]", ("0123", "no")),
        ("server.is_strict", "yes", True),
        ("server.is_strict", "Off", False),
        ("server.port", "8_000", 8000),
        ("server.port", "0x1F40", 8000),
        ("server.sse_ping_s", "1e1", 10.0),
    ],
)
def test_yaml_values_are_what_is_written(
    write: WriteYaml, key: str, text: str, value: object
) -> None:
    section, name = key.split(".")
    loaded = load(write(f"{section}:\n  {name}: {text}\n"))
    assert next(entry.value for entry in loaded.entries if entry.key.path == key) == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MOE_SERVE_SERVER_PROT", "1", r"unknown environment variable .* did you mean .*PORT"),
        ("MOE_SERVE_SERVER_PORT", "x", r"server.port cannot be 'x' \(MOE_SERVE_SERVER_PORT\)"),
        ("MOE_SERVE_SERVER_PORT", "1.5", r"server.port cannot be '1.5'"),
        ("MOE_SERVE_SERVER_PORT", "8_0_0_0", r"server.port cannot be '8_0_0_0'"),
        ("MOE_SERVE_SERVER_PORT", "\u0661\u0662", r"server.port cannot be '\u0661\u0662'"),
        ("MOE_SERVE_SERVER_PORT", "9" * 5000, r"server.port cannot be '9{79}\.\.\. \("),
        ("MOE_SERVE_SERVER_MAX_BODY_BYTES", "9" * 5000 + "MiB", r"max_body_bytes cannot be '9{79}"),
        ("MOE_SERVE_SERVER_IS_STRICT", "maybe", r"true or false"),
        ("MOE_SERVE_CONFIG", "/nonexistent.yaml", r"cannot read the configuration /nonexistent"),
    ],
)
def test_a_wrong_variable_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(environ={name: value})


def test_an_empty_file_sets_nothing(write: WriteYaml) -> None:
    assert load(write("")).config == Config()
    assert load(write("server:\n# nothing\n")).config == Config()


def test_keys_are_read_from_files_and_never_shown(tmp_path: Path) -> None:
    secrets = tmp_path / "keys"
    secrets.write_text("# clients\nsecret-1\n\n  # others\nsecret#2  # the second\n", "utf-8")
    loaded = load(flags={"server.api_keys": [f"@{secrets}", "secret-3"]})
    assert loaded.config.server.api_keys == ("secret-1", "secret#2", "secret-3")
    shown = loaded.to_yaml() + "".join(entry.shown for entry in describe(loaded))
    assert "secret" not in shown
    assert "# api_keys: 3 set, not shown" in shown
    with pytest.raises(ConfigError, match="holds no API key"):
        (tmp_path / "empty").write_text("\n", "utf-8")
        load(flags={"server.api_keys": [f"@{tmp_path / 'empty'}"]})


def test_what_is_printed_reads_back(write: WriteYaml) -> None:
    flags: dict[str, object] = {
        "model.path": "a: # tricky 'folder'",
        "cache.num_pages": 12,
        "server.served_model_name": "on",
        "server.drain_timeout_s": 1e-3,
    }
    loaded = load(flags=flags)
    assert load(write(loaded.to_yaml())).config == loaded.config
    for name in ("1e5", "017", "0o17", "1:30", "2026-01-02", "~", ".inf", "yes", "8_000", "="):
        loaded = load(flags={"server.served_model_name": name})
        assert load(write(loaded.to_yaml())).config.server.served_model_name == name


def test_the_documented_file_is_the_default_and_has_every_key() -> None:
    loaded = load(ROOT / "configs" / "serve.yaml")
    assert loaded.config == Config()
    assert [entry.key.path for entry in loaded.entries if entry.source == "default"] == []


def test_a_config_made_in_code_is_held_to_the_same_limits() -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=0))
    with pytest.raises(ConfigError, match=r"scheduler.max_num_seqs cannot be 0 \(an argument\)"):
        check_engine_config(config)
    both = dataclasses.replace(EngineConfig(), cache=CacheConfig(num_pages=1, memory_bytes=1))
    with pytest.raises(ConfigError, match="both set"):
        check_engine_config(both)
    assert check_engine_config(EngineConfig()) == EngineConfig()


def test_settings_may_follow_an_api_key_in_a_list(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text('server: {api_keys: ["s3cret   tier=a,b min_priority=5", "plain"]}\n')
    loaded = load_config(flags={}, environ={}, file=file)
    assert loaded.config.server.api_keys == ("s3cret   tier=a,b min_priority=5", "plain")
    for keys in ('[" "]', r'["a\ntier=b"]', '["a tier=b c"]'):
        file.write_text(f"server: {{api_keys: {keys}}}\n")
        with pytest.raises(ConfigError, match="server.api_keys cannot be this value"):
            load_config(flags={}, environ={}, file=file)
