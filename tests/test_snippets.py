"""The runner of examples in documents fails when an example does not do what the page shows."""

from pathlib import Path

import pytest
from snippets import blocks, matches, run_page

PAGE = """
```bash
gym-trace record CartPole-v1 -o traces/cartpole --episodes 3 --seed 0
gym-trace ls nothing  # exit code 1
```

```text
recorded 3 episodes: … steps …
error: nothing: …
```

```python title="agent.py"
HEAVY = 2
```

<!-- needs: no-such-package>=1 -->
```python
import no_such_package
```

```text
never compared
```

```python
import agent
import gym_trace

print(len(gym_trace.open_trace("traces/cartpole")), agent.HEAVY)
```

```text
3 2
```
"""


def run(page: str, directory: Path) -> int:
    (directory / "page.md").write_text(page)
    return run_page(directory / "page.md", directory)


def test_blocks_run_in_order_and_skip_missing_packages(tmp_path: Path) -> None:
    assert run(PAGE, tmp_path) == 2


@pytest.mark.parametrize(
    ("shown", "instead", "message"),
    [
        ("3 2", "3 3", "page.md:.*expected"),
        ("# exit code 1", "", "ls nothing.*exit code 1, not 0"),
        ("--seed 0", "--seed 0  # exit code 3", "exit code 0, not 3"),
        ("import agent\n", "import warnings\nwarnings.warn('old')\n", "exit code 1"),
        ("error: nothing", "error: something", "expected"),
    ],
)
def test_a_page_that_shows_something_else_fails(shown: str, instead: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        run(PAGE.replace(shown, instead), tmp_path)


def test_a_block_of_a_list_is_dedented_and_one_that_is_not_run_says_so() -> None:
    page = (
        "- text\n\n    ```python\n    if 1:\n        2\n    ```\n\n<!-- not run: it asks -->\n```bash\nrm -r x\n```\n"
    )
    first, second = blocks(page)
    assert first.code == "if 1:\n    2\n"
    assert not second.is_runnable


@pytest.mark.parametrize(
    ("printed", "expected"), [("a 12 b\nc  \n", "a … b\nc\n"), ("a\nb\nc\n", "a\n…\nc"), ("(x)*\n", "(x)*")]
)
def test_an_ellipsis_stands_for_any_text(printed: str, expected: str) -> None:
    assert matches(printed, expected)
    assert not matches(printed + "more", expected)
