"""A model's tensors, read one at a time from one file or several."""

import pytest

from tests.megatron_models import build_hf, file_names
from trainers.hf_folder import HFFolder


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
