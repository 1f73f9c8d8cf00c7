"""The fused benchmark: what it reads of the library."""

from benchmarks.fused import _our_compile


def test_our_loop_is_compiled_alone() -> None:
    assert _our_compile("gymnax/CartPole-v1", 2, 4) > 0
