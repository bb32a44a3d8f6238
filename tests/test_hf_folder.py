"""A model's tensors, read one at a time from one file or several."""

import pytest
import torch
from safetensors import SafetensorError

from tests.megatron_models import build_hf, file_names
from trainers.engines import TensorSpec
from trainers.hf_folder import HFFolder, write_weights


@pytest.mark.parametrize(("size", "files"), [("1GB", 1), ("20KB", 4)])
def test_tensors_are_those_of_the_model(tmp_path, size, files):
    model = build_hf("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) >= files
    ours, folder = file_names(model.named_parameters()), HFFolder(tmp_path)
    assert not folder.files or files == 1  # nothing is opened before it is asked for
    assert set(folder) == set(ours) and len(folder) == len(ours)
    assert all(folder[name].equal(tensor) for name, tensor in ours.items())


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json"):
        HFFolder(tmp_path)


def test_a_file_that_cannot_be_written_is_an_error_once_all_tensors_were_taken(tmp_path):
    """Another rank may be waiting for this one to take the next."""
    tensors, taken = {name: torch.ones(8) for name in "abc"}, []
    manifest = {name: TensorSpec((8,), torch.float32) for name in tensors}
    stream = ((taken.append(name) or name, tensor) for name, tensor in tensors.items())
    with pytest.raises(SafetensorError):
        write_weights(tmp_path / "missing", manifest, stream, here=True, file_bytes=32)
    assert taken == ["a", "b", "c"]
    write_weights(tmp_path, manifest, iter(tensors.items()), here=True, file_bytes=32)
    assert {name: tensor.tolist() for name, tensor in HFFolder(tmp_path).items()} == dict.fromkeys("abc", [1.0] * 8)
