"""Damaged checkpoints of every kind: refused in clear lines that name the file or the tensor, nothing loaded, nothing written."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3core.checkpoint import hf_read
from k3core.checkpoint.hf import Checkpoint, iter_tensors, load_model, open_checkpoint, save_checkpoint
from k3core.checkpoint.names import expected_shapes, is_foreign
from k3core.checkpoint.safetensors_io import encode_header, read_header
from k3core.errors import IntegrityError
from k3core.model.config import K3Config
from k3core.model.model import K3Model

ReleasedFolder = Callable[..., Path]
RandomTensors = Callable[..., dict[str, Tensor]]
Edit = Callable[[dict[str, Tensor]], None]

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def no_model_is_built_from_a_refused_folder(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was built, so that a refusal can show that it came first."""
    built: list[str] = []
    build = hf_read.build_model

    def counting(cfg: K3Config, *options: Any) -> Any:
        built.append("a model")
        return build(cfg, *options)

    monkeypatch.setattr(hf_read, "build_model", counting)
    return built


def refusal(folder: Path, built: list[str] | None = None) -> str:
    """What opening, loading and saving `like` it all say."""
    with pytest.raises((ValueError, IntegrityError)) as refused:
        open_checkpoint(folder)
    said = str(refused.value)
    assert type(refused.value) in (ValueError, IntegrityError)
    assert said
    assert len(said) < 20_000
    with pytest.raises(type(refused.value), match=re.escape(said)):
        load_model(folder)
    assert not built
    target = folder.parent / "target"
    with pytest.raises(type(refused.value), match=re.escape(said)):
        save_checkpoint(target, K3Config(), iter(()), like=folder)
    assert not target.exists()
    return said


def outcome(work: Callable[[], Any]) -> Any:
    """What it gives, or what it raises, of whatever kind."""
    try:
        return work()
    except Exception as error:
        return error


def edit_file(folder: Path, edit: Edit, file: str = SECOND) -> None:
    """Rewrites a file of tensors, and the index so that it stays true."""
    tensors = load_file(folder / file)
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file)
    index = json.loads((folder / INDEX).read_text())
    names = {name: where for name, where in index["weight_map"].items() if where != file}
    (folder / INDEX).write_text(json.dumps({"weight_map": names | dict.fromkeys(tensors, file)}))


def edit_json(path: Path, edit: Callable[[Any], Any]) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(edit(document)))


def prefix(cfg: K3Config) -> str:
    return "language_model.model." if cfg.family == "kimi_k3" else "model."


# One tensor or file


def test_every_fault_of_every_tensor_is_listed_at_once(k3: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(k3)
    p = "language_model.model.layers"

    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{p}.3.block_sparse_moe.experts.4.w2.weight"]
        del tensors[f"{p}.2.self_attn.kv_b_proj.weight"]
        tensors[f"{p}.9.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["lm_head.bias"] = torch.zeros(2)
        q = tensors[f"{p}.2.self_attn.q_b_proj.weight"]
        tensors[f"{p}.2.self_attn.q_b_proj.weight"] = q.T
        tensors[f"{p}.3.self_attn.dt_bias"] = tensors[f"{p}.3.self_attn.dt_bias"].to(torch.int32)
        tensors[f"{p}.2.post_attention_layernorm.weight"] = torch.zeros(20, dtype=torch.float64)

    edit_file(folder, damage)
    said = refusal(folder).splitlines()
    assert said[0] == f"{folder}: 7 fault(s)"
    assert sorted(line.strip() for line in said[1:]) == sorted(
        [
            f"missing: {p}.3.block_sparse_moe.experts.4.w2.weight",
            f"missing: {p}.2.self_attn.kv_b_proj.weight",
            f"unexpected: {p}.9.mlp.up_proj.weight in {SECOND}",
            f"unexpected: lm_head.bias in {SECOND}",
            f"{p}.2.self_attn.q_b_proj.weight in {SECOND}: BF16 [14, 20] in place of F32 or BF16 or F16 [20, 14]",
            f"{p}.3.self_attn.dt_bias in {SECOND}: I32 [24] in place of F32 or BF16 or F16 [24]",
            f"{p}.2.post_attention_layernorm.weight in {SECOND}: F64 [20] in place of F32 or BF16 or F16 [20]",
        ]
    )


def test_a_whole_layer_that_is_missing_is_few_lines(k3: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(k3)

    def damage(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.4.block_sparse_moe." in name]:
            del tensors[name]

    edit_file(folder, damage)
    said = refusal(folder)
    assert "missing: language_model.model.layers.4.block_sparse_moe.experts.{0-5}.w3.weight" in said
    assert said.count("\n") == 11


def test_every_single_tensor_is_missed_and_every_stranger_noticed(
    form: K3Config, released_folder: ReleasedFolder
) -> None:
    folder = released_folder(form, is_single=True)
    file = folder / "model.safetensors"
    whole = load_file(file)
    names = [name for name in whole if not is_foreign(name)]
    for name in random.Random(0).sample(names, 40):
        save_file({n: t for n, t in whole.items() if n != name}, file)
        assert refusal(folder).splitlines()[1:] == [f"  missing: {name}"]
        save_file({n.replace(name, f"{name}x"): t for n, t in whole.items()}, file)
        assert f"  unexpected: {name}x in model.safetensors" in refusal(folder).splitlines()


def test_projections_that_are_swapped_are_noticed_by_their_shape(
    kimi_linear: K3Config, released_folder: ReleasedFolder
) -> None:
    folder = released_folder(kimi_linear, is_single=True)
    whole = load_file(folder / "model.safetensors")
    q, o = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qo")
    whole[q], whole[o] = whole[o].clone(), whole[q].clone()
    save_file(whole, folder / "model.safetensors")
    said = refusal(folder)
    assert f"{q} in model.safetensors: BF16 [20, 24] in place of F32 or BF16 or F16 [24, 20]" in said
    assert f"{o} in model.safetensors: BF16 [24, 20] in place of F32 or BF16 or F16 [20, 24]" in said


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8]
)
def test_a_type_that_no_weight_has_is_named(k3: K3Config, released_folder: ReleasedFolder, dtype: torch.dtype) -> None:
    folder = released_folder(k3)
    name = "language_model.model.norm.weight"
    edit_file(folder, lambda tensors: tensors.update({name: torch.ones(20).to(dtype)}))
    assert f"{name} in {SECOND}: " in refusal(folder)


@pytest.mark.parametrize("shape", [(4,), (96,), (127,), (129,), (256,), (1, 3, 1, 1), (1, 1, 128, 1), (3, 1), ()])
def test_A_log_of_another_length_is_refused(
    k3: K3Config, released_folder: ReleasedFolder, shape: tuple[int, ...]
) -> None:
    folder = released_folder(k3)
    name = "language_model.model.layers.3.self_attn.A_log"
    edit_file(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    assert (
        f"{name} in {SECOND}: F32 {list(shape)} in place of F32 or BF16 or F16 [3] or [1, 1, 3, 1] or [128]"
        in refusal(folder)
    )


def test_one_tensor_under_two_spellings_is_there_twice(kimi_linear: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(kimi_linear)
    mlp, moe = (f"model.layers.0.{x}.up_proj.weight" for x in ("mlp", "block_sparse_moe"))
    edit_file(folder, lambda tensors: tensors.update({moe: torch.ones(28, 20)}))
    assert re.search(rf"there twice: {mlp} in {FIRST} and {moe} in {SECOND}", refusal(folder))


# Packed and plain experts


def test_a_block_that_was_left_over_is_refused_with_its_remedy(
    k3_packed: K3Config, released_folder: ReleasedFolder
) -> None:
    plain = released_folder(replace(k3_packed, expert_quantization=None), name="plain")
    packed = released_folder(k3_packed, name="packed")
    shutil.copy(packed / "config.json", plain / "config.json")
    said = refusal(plain).splitlines()
    assert len(said) == 2
    assert "config.json says by its quantization_config" in said[1]
    assert "all 72 expert matrices are plain BF16: remove the block" in said[1]


def test_packed_experts_without_a_block_are_refused(k3_packed: K3Config, released_folder: ReleasedFolder) -> None:
    plain = released_folder(replace(k3_packed, expert_quantization=None), name="plain")
    packed = released_folder(k3_packed, name="packed")
    shutil.copy(plain / "config.json", packed / "config.json")
    said = refusal(packed).splitlines()
    assert len(said) == 2
    assert "config.json has no quantization_config" in said[1]
    assert "put back the block" in said[1]


@pytest.mark.parametrize("says", ["packed", "plain"])
def test_experts_that_are_partly_packed_are_listed(
    k3_packed: K3Config, released_folder: ReleasedFolder, says: str
) -> None:
    plain = released_folder(replace(k3_packed, expert_quantization=None), name="plain")
    packed = released_folder(k3_packed, name="packed")
    matrices = [f"language_model.model.layers.{n}.block_sparse_moe.experts.{e}.w1" for n, e in ((1, 2), (1, 3), (3, 5))]

    def damage(tensors: dict[str, Tensor]) -> None:
        for matrix in matrices:
            if f"{matrix}.weight_packed" in tensors:
                del tensors[f"{matrix}.weight_packed"], tensors[f"{matrix}.weight_scale"]
                tensors[f"{matrix}.weight"] = torch.zeros(32, 64, dtype=torch.bfloat16)

    for file in (FIRST, SECOND):
        edit_file(packed, damage, file)
    if says == "plain":
        shutil.copy(plain / "config.json", packed / "config.json")
    said = refusal(packed).splitlines()
    assert len(said) == 2, said
    assert (
        "these alone are plain: layers.1.block_sparse_moe.experts.{2-3}.w1, layers.3.block_sparse_moe.experts.5.w1"
        in said[1]
    )


def test_codes_without_scales_and_of_another_shape_are_named(
    k3_packed: K3Config, released_folder: ReleasedFolder
) -> None:
    folder = released_folder(k3_packed)
    matrix = "language_model.model.layers.3.block_sparse_moe.experts.5.w2"

    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{matrix}.weight_scale"]
        tensors[f"{matrix}.weight_packed"] = tensors[f"{matrix}.weight_packed"][:, :8]

    edit_file(folder, damage)
    said = refusal(folder)
    assert f"missing: {matrix}.weight_scale" in said
    assert f"{matrix}.weight_packed in {SECOND}: U8 [64, 8] in place of U8 [64, 16]" in said


# Files


@pytest.mark.parametrize("file", [FIRST, SECOND])
def test_a_file_that_is_cut_anywhere_is_named(form: K3Config, released_folder: ReleasedFolder, file: str) -> None:
    folder = released_folder(form)
    whole = (folder / file).read_bytes()
    header = read_header(folder / file)
    ends = [entry.offset + entry.num_bytes for entry in header.entries.values()]
    places = {0, 1, 7, 8, 9, header.num_bytes // 2, header.num_bytes - 1, header.num_bytes, header.num_bytes + 1}
    places |= {end + step for end in random.Random(0).sample(ends, 8) for step in (-1, 0, 1)}
    places |= set(random.Random(1).sample(range(len(whole)), 20))
    for place in sorted(place for place in places if place < len(whole)):
        (folder / file).write_bytes(whole[:place])
        with pytest.raises(IntegrityError, match=re.escape(str(folder / file))):
            open_checkpoint(folder)
    assert "cut short" in refusal(folder)
    (folder / file).write_bytes(whole + b"\0")
    assert "what follows belongs to nothing" in refusal(folder)


def test_a_header_with_any_byte_changed_is_refused_or_says_the_same(
    form: K3Config, released_folder: ReleasedFolder
) -> None:
    folder = released_folder(form)
    good = dict(iter_tensors(open_checkpoint(folder)))
    whole = (folder / SECOND).read_bytes()
    end = read_header(folder / SECOND).num_bytes
    generator = random.Random(0)
    refused = 0
    for place in [*range(24), *generator.sample(range(24, end), 150)]:
        changed = bytearray(whole)
        changed[place] ^= 1 << generator.randrange(8)
        (folder / SECOND).write_bytes(changed)
        found = outcome(lambda: dict(iter_tensors(open_checkpoint(folder), check_finite=False)))
        if isinstance(found, dict):  # a byte of the metadata, or of a vision tensor's name
            assert all(torch.equal(found[name], tensor) for name, tensor in good.items())
        else:
            assert type(found) in (ValueError, IntegrityError), repr(found)
            assert "model-00002-of-00002" in str(found)
            refused += 1
    assert refused > 150


def test_several_broken_files_are_listed_at_once(k3: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(k3)
    for file in (FIRST, SECOND):
        os.truncate(folder / file, 1000)
    said = refusal(folder)
    assert FIRST in said
    assert SECOND in said


def test_tensors_that_overlap_or_leave_the_file_are_named(k3: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(k3)
    good = (folder / SECOND).read_bytes()
    end = read_header(folder / SECOND).num_bytes
    header = json.loads(good[8:end])
    name = "language_model.model.norm.weight"
    start, stop = header[name]["data_offsets"]
    for offsets, message in (
        ([start - 2, stop - 2], "overlaps"),
        ([2**40, 2**40 + 40], "cut short"),
        ([stop, start], "no range"),
    ):
        header[name]["data_offsets"] = offsets
        text = json.dumps(header).encode()
        (folder / SECOND).write_bytes(len(text).to_bytes(8, "little") + text + good[end:])
        said = refusal(folder)
        assert message in said
        assert name in said or message == "cut short"


@pytest.mark.parametrize("kind", ["absent", "folder", "dangling", "empty", "pipe"])
@pytest.mark.parametrize("name", ["config.json", INDEX, SECOND])
def test_what_cannot_be_read_is_named(k3: K3Config, released_folder: ReleasedFolder, kind: str, name: str) -> None:
    folder = released_folder(k3)
    (folder / name).unlink()
    if kind == "folder":
        (folder / name).mkdir()
    elif kind == "dangling":
        (folder / name).symlink_to(folder / "nowhere")
    elif kind == "empty":
        (folder / name).write_bytes(b"")
    elif kind == "pipe":
        os.mkfifo(folder / name)
    assert name in refusal(folder)


def test_a_file_that_cannot_be_opened_is_named(
    k3: K3Config, released_folder: ReleasedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = released_folder(k3)
    checkpoint = open_checkpoint(folder)

    def denied(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(IntegrityError, match=rf"{FIRST}: .* cannot be read: Permission denied"):
        next(iter_tensors(checkpoint))


@pytest.mark.parametrize("what", ["absent", "file", "empty", "pickle", "unindexed"])
def test_a_path_that_is_no_checkpoint_is_said(
    tmp_path: Path, k3: K3Config, released_folder: ReleasedFolder, what: str
) -> None:
    folder = tmp_path / "folder"
    expected = {"absent": "found nothing", "file": "found a file", "empty": "config.json: cannot be read: No such file"}
    if what == "file":
        folder.write_text("x")
    elif what == "empty":
        folder.mkdir()
    elif what in ("pickle", "unindexed"):
        folder = released_folder(k3)
        (folder / INDEX).unlink()
        expected["unindexed"] = f"found 2 other safetensors files ({FIRST}, ...): fetch the checkpoint whole"
    if what == "pickle":
        (folder / FIRST).unlink()
        (folder / SECOND).unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
        expected["pickle"] = "found no safetensors file"
    said = refusal(folder)
    assert str(folder) in said
    assert expected[what] in said


# Index


def test_an_index_that_names_an_absent_file_says_so_once(k3: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(k3)
    count = len(load_file(folder / FIRST))
    (folder / FIRST).unlink()
    said = refusal(folder).splitlines()
    assert said[1:] == [f"  {INDEX} names {FIRST}, which is not there ({count} tensors)"]


def test_an_index_that_places_tensors_elsewhere_is_refused(k3: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(k3)
    norm, head = "language_model.model.norm.weight", "language_model.lm_head.weight"

    def damage(index: Any) -> Any:
        del index["weight_map"][norm]
        index["weight_map"][head] = SECOND
        index["weight_map"]["language_model.model.ghost"] = SECOND
        return index

    edit_json(folder / INDEX, damage)
    said = refusal(folder)
    assert f"{INDEX} places {head} in {SECOND}, which does not hold it" in said
    assert f"{INDEX} places language_model.model.ghost in {SECOND}, which does not hold it" in said
    assert f"{FIRST} holds {head}, which {INDEX} does not place there" in said
    assert f"{SECOND} holds {norm}, which {INDEX} does not place there" in said


def test_a_tensor_in_two_files_is_there_twice(k3: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(k3)
    head = "language_model.lm_head.weight"
    second = load_file(folder / SECOND) | {head: torch.zeros(61, 20)}
    save_file(second, folder / SECOND)
    said = refusal(folder)
    assert f"there twice: {head} in {FIRST} and {head} in {SECOND}" in said


def test_a_single_file_beside_an_index_that_does_not_name_it_is_refused(
    k3: K3Config, released_folder: ReleasedFolder
) -> None:
    folder = released_folder(k3)
    shutil.copy(folder / FIRST, folder / "model.safetensors")
    assert f"holds model.safetensors beside an {INDEX} that does not name it" in refusal(folder)


@pytest.mark.parametrize(
    "index",
    [
        *("[]", "3", "null", '"x"', "{}", "{", "", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000),
        *(
            '{"weight_map": {"a": 3}}',
            '{"weight_map": {"a": "../b.safetensors"}}',
            '{"weight_map": {"a": "/etc/passwd"}}',
        ),
        *(
            '{"weight_map": {"a": "x/y.safetensors"}}',
            '{"weight_map": {"a": "b\\u0000.safetensors"}}',
            "\xff",
            "9" * 5000,
        ),
    ],
)
def test_an_index_of_another_form_is_refused(k3: K3Config, released_folder: ReleasedFolder, index: str) -> None:
    folder = released_folder(k3)
    (folder / INDEX).write_text(index, encoding="latin-1")
    said = refusal(folder)
    assert INDEX in said
    assert "\n" not in said


# config.json


@pytest.mark.parametrize(
    "document", ["[]", "3", "null", '"x"', "{", "", "{}", "NaN", "[" * 100_000, "\xff", "9" * 5000]
)
def test_a_config_of_another_form_is_refused(k3: K3Config, released_folder: ReleasedFolder, document: str) -> None:
    folder = released_folder(k3)
    (folder / "config.json").write_text(document, encoding="latin-1")
    assert str(folder / "config.json") in refusal(folder)


@pytest.mark.parametrize("missing", ["full_attn_layers", "kda_layers"])
def test_a_config_without_a_layer_list_is_refused(
    form: K3Config, released_folder: ReleasedFolder, missing: str
) -> None:
    folder = released_folder(form)

    def damage(document: Any) -> Any:
        del document.get("text_config", document)["linear_attn_config"][missing]
        return document

    edit_json(folder / "config.json", damage)
    assert f"linear_attn_config.{missing}: missing" in refusal(folder)


VALUES: list[Any] = [None, "x", -1, 0, 1, 7, 10**12, 2**80, 1.5, float("inf"), float("nan"), True, False, [], [1], {}]


def test_a_config_with_any_value_changed_is_refused_or_fits_the_tensors(
    form: K3Config, released_folder: ReleasedFolder
) -> None:
    folder = released_folder(form)
    whole = json.loads((folder / "config.json").read_text())
    inner = whole.get("text_config", whole)
    linear = inner["linear_attn_config"]
    paths = [(*place, key) for place, part in (((), whole), (("t",), inner), (("t", "l"), linear)) for key in part]
    outcomes = {"refused": 0, "opened": 0}
    for path in paths:
        for value in VALUES:
            document = copy.deepcopy(whole)
            part = document.get("text_config", document) if path[:1] == ("t",) else document
            part = part["linear_attn_config"] if path[:2] == ("t", "l") else part
            part[path[-1]] = value
            (folder / "config.json").write_text(json.dumps(document))
            found = outcome(lambda: open_checkpoint(folder))
            if isinstance(found, Checkpoint):
                assert found.model_tensors.keys() == expected_shapes(found.cfg).keys(), (path, value)
                outcomes["opened"] += 1
            else:
                assert type(found) is ValueError, (path, value, repr(found))
                assert str(folder) in str(found)
                outcomes["refused"] += 1
    assert outcomes["refused"] > 400
    assert outcomes["opened"] > 100


# Whole folders at random


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_never_raises_anything_else(form: K3Config, released_folder: ReleasedFolder, seed: int) -> None:
    folder = released_folder(form, is_single=seed % 2 == 0)
    generator = random.Random(seed)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    for _ in range(5):
        path = generator.choice(files)
        data = bytearray(path.read_bytes())
        for _ in range(generator.randrange(1, 4)):
            start = generator.randrange(len(data))
            length = generator.choice([1, 1, 2, 8, 100])
            kind = generator.randrange(4)
            if kind == 0:
                data[start : start + length] = generator.randbytes(length)
            elif kind == 1:
                del data[start : start + length]
            elif kind == 2:
                data[start:start] = generator.randbytes(length)
            else:
                other = generator.randrange(len(data))
                data[start : start + length] = data[other : other + length]
            data = data or bytearray(b"x")
        path.write_bytes(data)
        found = outcome(lambda: load_model(folder))
        if not isinstance(found, K3Model):
            assert type(found) in (ValueError, IntegrityError), repr(found)
            assert str(folder) in str(found)


def test_a_header_may_be_in_any_order_and_hold_further_keys(k3: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(k3)
    good = dict(iter_tensors(open_checkpoint(folder)))
    whole = (folder / SECOND).read_bytes()
    header = read_header(folder / SECOND)
    document = json.loads(whole[8 : header.num_bytes])
    items = list(document.items())
    random.Random(0).shuffle(items)
    text = json.dumps(
        {name: {**value, "more": 1} if name != "__metadata__" else value for name, value in items}, indent=1
    )
    data = text.encode()
    (folder / SECOND).write_bytes(len(data).to_bytes(8, "little") + data + whole[header.num_bytes :])
    again = dict(iter_tensors(open_checkpoint(folder)))
    assert all(torch.equal(again[name], tensor) for name, tensor in good.items())


def test_a_config_of_a_larger_model_than_the_files_hold_is_said_in_one_line(
    k3: K3Config, released_folder: ReleasedFolder
) -> None:
    folder = released_folder(k3)

    def damage(document: Any) -> Any:
        document["text_config"]["num_experts"] = 10**9
        return document

    edit_json(folder / "config.json", damage)
    said = refusal(folder).splitlines()
    assert len(said) == 2
    assert "config.json describes 12000000000 expert matrices" in said[1]


def test_an_empty_tensor_file_is_a_file_of_none(k3: K3Config, released_folder: ReleasedFolder) -> None:
    folder = released_folder(k3)
    header, _ = encode_header([], {"format": "pt"})
    (folder / SECOND).write_bytes(header)
    said = refusal(folder)
    assert f"{INDEX} places" in said
    assert "missing: language_model.model.norm.weight" in said
