"""A bad checkpoint is refused in one sentence that names the file and the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint import safetensors_file
from moe_serve.model.checkpoint.checkpoint import Checkpoint, demo_model_folder
from moe_serve.model.families import FAMILIES
from moe_serve.model.load.loader import ModelLoader

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 20, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (20, 16),
    "model.norm.weight": (16,),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.post_attention_layernorm.weight": (16,),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.v_proj.weight": (8, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 16),
    "model.layers.0.self_attn.q_norm.weight": (8,),
    "model.layers.0.self_attn.k_norm.weight": (8,),
    "model.layers.0.mlp.gate.weight": (2, 16),
} | {
    f"model.layers.0.mlp.experts.{e}.{name}_proj.weight": shape
    for e in range(2)
    for name, shape in (("gate", (8, 16)), ("up", (8, 16)), ("down", (16, 8)))
}
ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({n: torch.randn(s) for n, s in SHAPES.items()}, tmp_path / "model.safetensors")
    return tmp_path


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG | changes))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def index_names_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": dict.fromkeys(SHAPES, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_lies(folder: Path) -> None:
    save_file({"other": torch.zeros(1)}, folder / "other.safetensors")
    index = {"weight_map": dict.fromkeys(SHAPES, "other.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_is(text: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(text)

    return edit


def only(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / name)

    return edit


def tensor_in_two_files(folder: Path) -> None:
    save_file({ROUTER: torch.zeros(2, 16)}, folder / "router.safetensors")


def lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def index_points_outside(folder: Path) -> None:
    index = {"weight_map": dict.fromkeys(SHAPES, "../secret.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


CASES: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "config.json").unlink(), "has no config.json"),
    (lambda f: (f / "config.json").write_text("{"), r"config.json cannot be read as JSON"),
    (edit_config(architectures=["GPT2LMHeadModel"]), "'GPT2LMHeadModel', which is not served"),
    (edit_config(architectures=None), "architectures must name one architecture"),
    (edit_config(hidden_size="16"), "hidden_size must be a positive integer, is '16'"),
    (edit_config(num_experts=None), "num_experts is missing"),
    (edit_config(num_experts_per_tok=3), r"num_experts_per_tok \(3\) exceeds num_experts \(2\)"),
    (edit_config(num_key_value_heads=3), r"num_attention_heads \(2\) must be a multiple"),
    (edit_config(hidden_act="gelu"), "hidden_act is 'gelu'; only 'silu' is supported"),
    (edit_config(use_sliding_window=True), "use_sliding_window is True; only False"),
    (edit_config(mlp_only_layers=[0]), "tensor model.layers.0.mlp.gate_proj.weight is missing"),
    (edit_config(rope_scaling={"type": "longrope"}), "rope_scaling asks for 'longrope'"),
    (edit_config(rope_scaling={"type": "yarn"}), "'yarn' lacks original_max_position_embeddings"),
    (edit_config(torch_dtype="int8"), "dtype is 'int8'"),
    (edit_tensors(lambda t: t.pop(ROUTER)), f"tensor {ROUTER} is missing"),
    (edit_tensors(lambda t: t.update({ROUTER: torch.randn(3, 16)})),
     rf"model.safetensors: tensor {ROUTER} has shape \[3, 16\], but config.json implies \[2, 16\]"),
    (edit_tensors(lambda t: t.update({ROUTER: torch.zeros(2, 16, dtype=torch.int8)})),
     rf"tensor {ROUTER} has dtype I8"),
    (truncate, "model.safetensors is not a whole safetensors file"),
    (lambda f: (f / "model.safetensors").unlink(), "holds no .safetensors file"),
    (only("pytorch_model.bin"), "pytorch_model.bin but no .safetensors file: pickled weights can"),
    (index_names_a_missing_shard, "model-00001-of-00002.safetensors is missing"),
    (only("consolidated.00.pth"), "consolidated.00.pth but no .safetensors file: pickled"),
    (only("model.gguf"), "model.gguf but no .safetensors file, and only those are read"),
    (index_points_outside, "but a name in it must be a .safetensors file in the same folder"),
    (index_lies, "other.safetensors does not hold tensor model.embed_tokens.weight, although"),
    (index_is("{"), "index.json has no readable weight_map"),
    (index_is('{"weight_map": {"a": 3}}'), "index.json names '3', but a name in it must be a"),
    (index_is('{"weight_map": ' + "[" * 100_000), "index.json has no readable weight_map"),
    (index_is('{"weight_map": [[1, "a.safetensors"]]}'), "weight_map: it is not an object"),
    (index_is('{"weight_map": {"a": "\\u0000.safetensors"}}'), "must be a .safetensors file in"),
    (index_is('{"weight_map": {"a": "\\ud800.safetensors"}}'), "names .*, but a name in it must"),
    (edit_config(num_hidden_layers=2**31 - 1), "num_hidden_layers is 2147483647; at most 10000"),
    (tensor_in_two_files, f"tensor {ROUTER} is in model.safetensors and in router.safetensors"),
    (lfs_pointer, "model.safetensors is a Git LFS pointer, not the data: run `git lfs pull`"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "complaint"), CASES, ids=[c[1][:30] for c in CASES])
def test_refused(folder: Path, spoil: Callable[[Path], object], complaint: str) -> None:
    spoil(folder)
    with pytest.raises(CheckpointError, match=complaint):
        ModelLoader(folder)


def test_a_good_one_loads_whole_and_in_shards(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    loader = ModelLoader(folder, progress=lambda done, total: seen.append((done, total)))
    loader.expert_stage()
    loader.attention_stage(64)
    assert seen == [(i + 1, len(SHAPES)) for i in range(len(SHAPES))]
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, members in shards.items():
        save_file({n: tensors[n] for n in members}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {n: file for file, members in shards.items() for n in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    ModelLoader(folder).attention_stage(64)


def test_a_folder_of_links(folder: Path, tmp_path: Path) -> None:
    """Snapshots in the cache of the Hugging Face hub are links to blobs with other names."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("config.json", "model.safetensors")):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    seen: list[tuple[int, int]] = []
    loader = ModelLoader(snapshot, progress=lambda done, total: seen.append((done, total)))
    loader.expert_stage()
    loader.attention_stage(64)
    assert seen[-1] == (len(SHAPES), len(SHAPES)), "all weights were read"


def test_old_and_new_config_keys_mean_the_same(folder: Path) -> None:
    old = edit_config(rope_theta=5e5, torch_dtype="bfloat16")
    new = edit_config(
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, torch_dtype=None,
        dtype="bfloat16", num_experts=None, num_local_experts=2,
    )  # fmt: skip
    specs = []
    for edit in (old, new):
        edit(folder)
        specs.append(ModelLoader(folder).spec)
    assert specs[0] == specs[1]


def test_families_do_not_share_architectures() -> None:
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))


def test_the_demonstration_model_is_small_and_complete(tmp_path: Path) -> None:
    folder = demo_model_folder()
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 32 * 2**20
    spec = ModelLoader(folder).spec
    assert (spec.router.num_experts, spec.router.top_k) == (32, 4)
    assert spec.num_layers >= 6
    shutil.copytree(folder, tmp_path / "copy")
    assert ModelLoader(tmp_path / "copy").spec == spec


def test_a_copying_checkpoint_reads_no_header_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(folder)
    mapped = checkpoint.view(ROUTER)
    monkeypatch.setattr(safetensors_file, "_read_headers", None)
    with checkpoint.copying() as copying:
        first, second = copying.view(ROUTER), copying.view(ROUTER)
        assert torch.equal(first, mapped) and first.data_ptr() != second.data_ptr()
    assert checkpoint.view(ROUTER).data_ptr() == mapped.data_ptr(), "the map is still there"
