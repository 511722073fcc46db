"""Attributes of other libraries raise an AttributeError that says what to use."""

from pathlib import Path

import gymnasium
import pytest

from gym_trace import Episode, Trace, TraceRecordingWrapper, open_trace, record_episodes
from gym_trace.data.other_names import OF_EPISODE, OF_TRACE


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    directory: Path = tmp_path_factory.mktemp("names")
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory, record_infos=True) as env:
        record_episodes(env, episodes=1, seed=0)
    return open_trace(directory)


@pytest.mark.parametrize("name", OF_EPISODE)
def test_an_episode_says_what_to_use(name: str, trace: Trace) -> None:
    assert not hasattr(trace[0], name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use ") as error:
        getattr(trace[0], name)
    eval(str(error.value).partition("; use ")[2], {"episode": trace[0]})


@pytest.mark.parametrize("name", OF_TRACE)
def test_a_trace_says_what_to_use(name: str, trace: Trace) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use ") as error:
        getattr(trace, name)
    eval(str(error.value).partition("; use ")[2], {"trace": trace})


def test_other_names_get_the_usual_error(trace: Trace) -> None:
    for thing in (trace, trace[0]):
        with pytest.raises(AttributeError, match=r"object has no attribute 'nothing'$"):
            thing.nothing  # type: ignore[union-attr]  # noqa: B018


def test_an_attribute_error_inside_a_property_is_the_one_that_is_raised(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Episode, "index", property(lambda self: self._record.no_such_field))
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = trace[0].index
