"""What is a slice of an artifact, and of which."""

from __future__ import annotations

import pytest

from p2pkv.artifact.slice import WHOLE, Slice
from p2pkv.errors import UsageError
from p2pkv.limits import MAX_LAYERS, MAX_SEGMENTS
from tests.support.artifacts import make_sample, model

MANIFEST = make_sample(list(range(600)), description=model(layers=4)).artifact.manifest


@pytest.mark.parametrize("segments", [0, -1, MAX_SEGMENTS + 1, 2**80])
def test_so_many_segments_there_can_never_be(segments: int) -> None:
    with pytest.raises(UsageError, match="`segments`"):
        Slice(segments)


@pytest.mark.parametrize(
    "layers",
    [range(0), range(2, 2), range(3, 2), range(-1, 2), range(MAX_LAYERS + 1), range(0, 4, 2), range(3, 0, -1), range(2**80)],
)
def test_such_layers_there_can_never_be(layers: range) -> None:
    with pytest.raises(UsageError, match="`layers`"):
        Slice(layers=layers)


@pytest.mark.parametrize(
    ("wanted", "tokens"),
    [(WHOLE, 600), (Slice(1), 256), (Slice(2, range(4)), 512), (Slice(3, range(3, 4)), 600), (Slice(layers=range(1)), 600)],
)
def test_slices_of_this_artifact(wanted: Slice, tokens: int) -> None:
    wanted.check(MANIFEST)
    assert wanted.token_count(MANIFEST) == tokens


@pytest.mark.parametrize("wanted", [Slice(4), Slice(1, range(3, 5)), Slice(layers=range(4, 5))])
def test_slices_of_others(wanted: Slice) -> None:
    with pytest.raises(UsageError, match=r"the artifact has \d"):
        wanted.check(MANIFEST)
