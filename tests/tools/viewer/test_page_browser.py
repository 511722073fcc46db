"""The page in a real browser."""

import contextlib
import shutil
import sys
import time
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

import browser
import forked_python
import gymnasium as gym
import numpy as np
import pytest
from damage import flip, strip_parity
from faulty_server import QuietHandler, running, serving
from gymnasium.spaces import Box, Dict, Discrete, Text
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from runs import batch_reader, chunks_of
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from shell import ok
from viewer_requests import cartpoles, compacted_noise

import gym_trace
from gym_trace import TraceRecordingVectorWrapper, edit, open_trace
from gym_trace.format.batch_reader import RowRanges
from gym_trace.wrappers import TraceRecordingWrapper

pytestmark = [
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
    # selenium leaves the pipe of chromedriver to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]

HOSTILE = "<img src=x onerror='window.hostile=1'><script>window.hostile=1</script>"
SECONDS = 60.0
RUNS = """
(rows => rows.length === 2 && rows.map(e => e.innerText))([...document.querySelectorAll('.runs-table tbody tr')])
"""
PIXEL = """
const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
copy.drawImage(document.querySelector('.picture canvas'), 5, 5, 1, 1, 0, 0, 1, 1);
return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
"""


class Painted(gym.Env):
    """Pictures that say which step they are of, a jump at step 60, and text that wants to be HTML."""

    observation_space = Dict(
        {"picture": Box(0, 255, (24, 32, 3), np.uint8), "place": Box(-9, 9, (4,)), "note": Text(200, charset=HOSTILE)}
    )
    action_space = Discrete(3)

    def __init__(self, length: int = 100):
        self.length = length

    def _seen(self):
        place = np.array([np.sin(self.now / 9), np.cos(self.now / 9), self.now == 60, 0.5], np.float32)
        place[3] = self.np_random.normal()
        return {"picture": np.full((24, 32, 3), self.now, np.uint8), "place": place.clip(-9, 9), "note": HOSTILE}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = 0
        return self._seen(), {}

    def step(self, action):
        self.now += 1
        return self._seen(), float(action), self.now >= self.length, False, {"speed": self.now * 0.5, HOSTILE: HOSTILE}


def recorded(path, lengths, seed=0):
    env = TraceRecordingWrapper(Painted(), path, record_infos=True)
    for number, length in enumerate(lengths):
        env.unwrapped.length = length
        env.reset(seed=seed + number)
        generator = np.random.default_rng(seed + number)
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step(int(generator.integers(3)))
            done = terminated or truncated
    return env


class Page:
    """The open page: its address, its elements, its messages."""

    def __init__(self, driver, address):
        self.driver, self.address = driver, address
        self.refused, self.visits = None, 0
        driver.get("about:blank")
        self.begun = 1000 * time.time()

    def go(self, route=""):
        self.visits += 1  # in the address, as another route alone would not load the page again
        visit = f"{'&' if '?' in self.address else '?'}visit={self.visits}"
        # With the token: what the first page has stored may not be there yet.
        self.driver.get(self.address + visit + route)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def until(self, script, *arguments):
        """Wait until a script returns something true, and return that."""
        end = time.monotonic() + SECONDS
        script = f"try {{ return {script.strip()} }} catch (error) {{ return null }}"  # elements may not be there yet
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, (script, self.run("return document.body.innerText")[:2000], self.messages())
            time.sleep(0.02)
        return found

    def text(self, selector):
        return self.until("document.querySelector(arguments[0])?.textContent", selector)

    def press(self, *keys):
        for key in keys:
            self.run(
                "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))", key
            )

    def fill(self, selector, text):
        script = "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
        self.run(script + "e.dispatchEvent(new Event('input'))", selector, text)

    def scrub(self, step):
        script = (
            "const e = document.querySelector('.scrubber'); e.value = arguments[0]; e.dispatchEvent(new Event('input'))"
        )
        self.run(script, step)
        self.until(f"document.querySelector('canvas[data-step=\"{step}\"]')")

    def messages(self):
        """Return what the browser has logged since the last call, without the answers that `was_refused` expects."""
        log = self.driver.get_log("browser")
        messages = [entry["message"] for entry in log if entry["timestamp"] >= self.begun]  # not of tests before
        return [message for message in messages if not self.refused or self.refused not in message]

    def was_refused(self, status):
        """Wait until the browser has logged an answer of this status, some time after the page shows it."""
        end, refusal, seen = time.monotonic() + SECONDS, f"status of {status}", []
        while not any(refusal in message for message in seen):
            assert time.monotonic() < end, f"the browser has logged no answer of status {status}"
            time.sleep(0.02)
            seen += self.messages()
        assert [message for message in seen if refusal not in message] == []
        self.refused = refusal


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    root = tmp_path_factory.mktemp("traces")
    recorded(root / "first", (100, 70, 40, 5)).close()
    recorded(root / "second", (100, 1)).close()
    return root


@pytest.fixture(scope="module")
def address(traces):
    with browser.served(traces / "first", traces / "second") as one:
        yield one


@pytest.fixture
def page(driver, address):
    browser.look(driver)
    page = Page(driver, address)
    yield page
    assert page.messages() == []
    assert not page.run("return window.hostile")


def test_the_list_shows_every_episode_with_its_numbers(page):
    page.go("#trace=0")
    page.until("document.querySelectorAll('.episodes .space .row').length === 4")
    lengths = page.run("return [...document.querySelectorAll('.space .of-length')].map(e => e.textContent)")
    assert lengths == ["100", "70", "40", "5"]
    assert page.text(".matched") == "4 episodes"


def test_a_condition_and_a_brush_select_episodes(page):
    page.go("#trace=0")
    page.until("document.querySelectorAll('.bars .some').length > 0")
    page.fill(".where", "steps > 50")
    page.until("document.querySelector('.matched').textContent === '2 of 4 episodes'")
    page.until("location.hash.includes('where=steps%20%3E%2050')")
    page.fill(".where", "")
    page.until("document.querySelector('.matched').textContent === '4 episodes'")
    page.driver.find_element("css selector", ".search").send_keys("2")
    page.until("location.hash.includes('search=2')")
    page.driver.find_element("css selector", ".search").send_keys(Keys.ESCAPE)
    assert page.run("return document.querySelector('.search').value") == "2"  # as the list shows
    page.go("#trace=0")
    page.until("document.querySelectorAll('.bars .some').length > 0")  # the histograms come after the list
    chart = "document.querySelectorAll('.bars')[1]"
    page.run(
        f"const b = {chart}.getBoundingClientRect(); "
        "const at = x => ({clientX: x, clientY: b.top + 9, button: 0, pointerId: 1});"
        f"{chart}.setPointerCapture = () => {{}};"
        f"{chart}.dispatchEvent(new PointerEvent('pointerdown', at(b.right - 1)));"
        f"{chart}.dispatchEvent(new PointerEvent('pointerup', at(b.left + b.width / 2)))"
    )
    page.until("document.querySelector('.matched').textContent === '2 of 4 episodes'")
    assert "<= steps <=" in page.run("return document.querySelector('.where').value")


def test_a_wrong_condition_shows_the_error_of_the_server(page):
    page.go("#trace=0")
    page.until("document.querySelectorAll('.space .row').length === 4")
    page.fill(".where", "steps >")
    problem = page.until("!document.querySelector('.problem').hidden && document.querySelector('.problem').textContent")
    assert "steps >" in problem
    assert page.run("return document.querySelector('.where').getAttribute('aria-invalid')") == "true"
    page.was_refused(400)


def test_the_first_click_on_an_episode_opens_it(page):
    page.go("#trace=0")
    page.until("document.querySelectorAll('.bars .some').length > 0")
    page.until("document.querySelector('.learning .chart[role=slider]')")  # the list has moved down
    box = "document.querySelector('#row-1 .of-episode').getBoundingClientRect()"
    press = ActionChains(page.driver)  # at a point: the list may replace its elements at any moment
    press.w3c_actions.pointer_action.move_to_location(*page.run(f"const b = {box}; return [b.right - 12, b.y + 9]"))
    press.click_and_hold().perform()
    page.run("document.querySelector('.episodes .window').dispatchEvent(new Event('scroll'))")  # draws the list again
    ActionChains(page.driver).release().perform()
    page.until("location.hash.includes('episode=1')")


def test_a_brush_writes_few_digits_and_selects_what_it_counts(page):
    page.go("#trace=0")
    page.until("document.querySelectorAll('.bars .some').length > 0")
    chart = "document.querySelectorAll('.bars')[0]"
    page.run(
        f"const b = {chart}.getBoundingClientRect(); "
        "const at = x => ({clientX: x, clientY: b.top + 9, button: 0, pointerId: 1});"
        f"{chart}.setPointerCapture = () => {{}};"
        f"{chart}.dispatchEvent(new PointerEvent('pointerdown', at(b.left + 1)));"
        f"{chart}.dispatchEvent(new PointerEvent('pointerup', at(b.right - 1)))"
    )
    page.until("document.querySelector('.where').value.includes('return')")
    page.until("document.querySelector('.matched').textContent === '4 episodes'")
    assert len(page.run("return document.querySelector('.where').value")) < 30


POINTER = """
const chart = document.querySelector('.learning .chart'), box = chart.getBoundingClientRect();
chart.setPointerCapture = () => {};
const place = (x, y) => ({clientX: box.left + x, clientY: box.top + y, button: 0, pointerId: 1});
const at = (kind, x, y) => chart.dispatchEvent(new PointerEvent(kind, place(x, y)));
const x = steps => 46 + (box.width - 58) * steps / 215;  // four episodes end after 100, 170, 210 and 215 steps
"""


def test_a_brush_over_the_curve_selects_and_a_click_opens_an_episode(page):
    page.go("#trace=0")
    page.until("document.querySelector('.learning .chart[role=slider]')")
    page.run(POINTER + "at('pointerdown', x(150), 60); at('pointermove', x(212), 60); at('pointerup', x(212), 60)")
    page.until("document.querySelector('.where').value === '1 <= index <= 2'")
    page.until("document.querySelector('.matched').textContent === '2 of 4 episodes'")
    page.run(POINTER + "at('dblclick', 60, 60)")
    page.until("document.querySelector('.matched').textContent === '4 episodes'")
    y = page.until(f"(() => {{ {POINTER} for (let y = 0; y < 168; y++) {{ at('pointermove', x(170), y);"
                   " if (chart.matches('.near')) return y + 4 } })()")  # fmt: skip
    assert page.text(".learning .note").startswith("episode 1: return ")
    page.run(POINTER + f"at('pointerdown', x(170), {y}); at('pointerup', x(170), {y})")
    page.until("location.hash.includes('episode=1')")


def test_the_curve_of_value_errors_leads_to_a_wrong_value(driver, tmp_path):
    with TraceRecordingWrapper(Painted(4), tmp_path / "run", record_infos=True) as env:
        for version, value in enumerate((4.0, 4.0, 99.0, 4.0)):
            env.reset(seed=version)
            for _ in range(4):
                env.annotate(value=value, version=version, probabilities=np.array([0.5, 0.25, 0.25]))
                env.step(1)
    edit.annotate(tmp_path / "run", {"gamma": 1.0})
    with browser.served(tmp_path / "run") as address:
        page = Page(driver, address)
        page.go()
        choose = "const s = document.querySelector(`.learning select[aria-label='Curve ${arguments[0]}']`);"
        for which, choice in (("of", "value error"), ("over", "version")):
            page.until(f"(() => {{ {choose} return s.offsetParent && s.options.length > 1 }})()", which)
            page.run(choose + "s.value = arguments[1]; s.dispatchEvent(new Event('change'))", which, choice)
        page.until(
            "/value error over policy version/.test(document.querySelector('.chart').getAttribute('aria-label'))"
        )
        page.run("document.querySelector('.learning .chart').focus()")
        for key in ("Home", "ArrowRight", "ArrowRight"):
            page.run("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))", key)
        assert page.text(".learning .note").startswith("episode 2: return 4, version 2, value error 96.5")
        page.run("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))")
        panel = "document.querySelector(`[data-column='${arguments[0]}']`)"
        page.until(f"{panel}.querySelector('.legend').textContent === 'value99return to go4'", "value, return to go")
        assert page.text("[data-column='value, return to go'] .tag") == "discount 1"
        page.until(f"{panel}.querySelector('canvas').width > 0", "annotations.probabilities")
        areas = page.until(  # their heights, by colour
            "(c => { const d = c.getContext('2d').getImageData(c.width / 2, 0, 1, c.height).data, n = {};"
            " for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 150) n[d[i]] = (n[d[i]] ?? 0) + 1;"
            " const areas = Object.values(n).filter(one => one > 9); return areas.length === 3 && areas })"
            f"({panel}.querySelector('canvas'))",
            "annotations.probabilities",
        )
        assert abs(max(areas) - 2 * min(areas)) < 5
        assert page.messages() == []


def test_several_traces_open_on_their_comparison(page):
    page.go()
    rows = page.until(RUNS)
    assert [row.split()[:2] for row in rows] == [["first", "4"], ["second", "2"]]
    label = page.run("return document.querySelector('.learning .chart').getAttribute('aria-label')")
    assert "first ends at 2" in label  # no point of the grid is in the curve of the other
    page.run("document.querySelectorAll('.runs-table th button')[1].click()")
    page.until("document.querySelector('h1').textContent === 'second' && location.hash.includes('trace=1')")


def test_sorting_by_a_column_changes_the_order(page):
    page.go("#trace=0&sort=length")
    page.until("document.querySelector('.space .of-length')?.textContent === '5'")
    page.run("document.querySelector('.head .of-length button').click()")
    page.until("document.querySelector('.space .of-length')?.textContent === '100'")


def test_scrubbing_shows_the_picture_and_the_values_of_the_step(page):
    page.go("#trace=0&episode=0")
    page.until("document.querySelector('.picture canvas[data-step]')")
    for step in (100, 3, 64):
        page.scrub(step)
        assert page.run(PIXEL) == [step] * 3
    page.until("document.querySelector('.step h3').textContent === 'Step 64'")
    assert "32.5" in page.until("document.querySelector('.step:not(.waiting) .values').textContent")
    page.until("location.hash.includes('step=64')")


def test_playing_goes_on_to_the_end_and_stops(page):
    page.go("#trace=0&episode=1")
    page.until("document.querySelector('.picture canvas[data-step]')")
    page.press("]", "]", "]", " ")
    page.until(
        "document.querySelector('.scrubber').value === '70'"
        "&& document.querySelector('.play').ariaLabel.startsWith('Play')"
    )


def test_keys_step_and_seek(page):
    page.go("#trace=0&episode=0&step=20")
    page.until("document.querySelector('.scrubber')?.value === '20'")
    page.press("ArrowRight", "ArrowRight", "ArrowLeft")
    page.until("document.querySelector('.scrubber').value === '21'")
    page.press("End")
    page.until("document.querySelector('.scrubber').value === '100'")
    page.press("?")
    page.until("document.querySelector('dialog[open] kbd')")


def test_every_numeric_leaf_has_a_plot_with_the_cursor_at_the_step(page):
    page.go("#trace=0&episode=0&step=50")
    page.until("document.querySelectorAll('.panel canvas').length >= 4")
    names = page.run("return [...new Set([...document.querySelectorAll('.panel')].map(e => e.dataset.column))]")
    assert {"return", "rewards", "actions", "observations.place"} <= set(names)
    page.until("/translateX\\([1-9]/.test(document.querySelector('.panel .position').style.transform)")


def test_zooming_is_in_the_address_and_a_spike_stays_visible(page):
    page.go("#trace=0&episode=0&step=60&zoom=55-65")
    values = "document.querySelector('[data-column=\"observations.place\"] .legend')?.textContent"
    page.until(f"({values} ?? '').includes('[2]1')")
    page.press("0")
    page.until("!location.hash.includes('zoom')")


def test_flags_are_kept_and_give_a_command(page, traces):
    page.go("#trace=1&episode=1")
    page.until("document.querySelector('.flag-button.good')")
    page.press("g")
    page.until("document.querySelector('.flag-button.good').ariaPressed === 'true'")
    page.press("Escape")
    page.until("document.querySelector('.space .flag.good')")
    assert page.text(".command code").startswith("gym-trace edit filter")
    assert gym_trace.open_trace(traces / "second").select('flag == "good"').indices.tolist() == [1]


def test_comparison_marks_the_first_difference(page):
    page.go("#trace=0&episode=0&compare=1:0")
    assert "Same" in page.text(".banner.same")
    page.go("#trace=0&episode=0&compare=0:1")
    assert "First difference at step 0" in page.text(".banner.difference")
    page.until("document.querySelectorAll('.picture canvas[data-step]').length === 2")
    page.until("document.querySelectorAll('.line.differs').length > 0")
    page.press("End", "d")
    page.until("document.querySelector('.scrubber').value === '0'")
    select = "document.querySelector('.delta select')"
    page.run(f"{select}.value = 'rewards'; {select}.dispatchEvent(new Event('change'))")
    rewards = page.until(
        "(spans => spans.length === 2 && spans.every(e => e.textContent) && spans.map(e => e.textContent))"
        "([...document.querySelectorAll('.panel[data-column=rewards]:not(.delta *) .value span')])"
    )
    one, other = (float(text.replace("−", "-")) for text in rewards)
    page.until(f"Number(document.querySelector('.delta .value').textContent.replace('−', '-')) === {other - one}")
    colours = page.run(
        "return [...document.querySelectorAll('.picture canvas')].map(e => getComputedStyle(e).boxShadow)"
    )
    assert len(set(colours)) == 2


def test_two_episodes_of_the_list_or_one_that_is_offered_are_compared(page):
    page.go("#trace=0&sort=length")
    page.until("document.querySelectorAll('.space .row .pick').length === 4")
    page.press("c")
    page.until("document.querySelector('.row.picked')")
    page.run("document.querySelectorAll('.pick')[2].click()")
    page.until("location.hash.includes('episode=3') && location.hash.includes('compare=0:1')")
    page.until("document.querySelector('.banner.difference')")
    page.press("c")
    offers = page.until(
        "(e => e.length > 1 && e.map(one => one.textContent))([...document.querySelectorAll('.offers button')])"
    )
    assert [text for text in offers if text.startswith("Best") and "episode 0" in text]
    page.run("document.querySelectorAll('.offers button')[0].click()")
    page.until("location.hash.includes('episode=3') && location.hash.includes('compare=0:0')")


def test_findings_are_ticks_that_a_key_walks_through(page):
    page.go("#trace=0")
    page.until("!document.querySelector('[data-tool=lint]').disabled")
    page.run("document.querySelector('[data-tool=lint]').click()")
    page.until("document.querySelector('[data-tool=lint] .result')")
    page.fill(".proofs .steps-where", "next_observation.place[2] == 1 or step == 3 and reward >= 0")
    page.run("document.querySelector('.proofs form').requestSubmit()")
    assert "6 steps in 4 episodes" in page.until(
        "document.querySelector('.proofs output').textContent.includes('where')"
        "&& document.querySelector('.proofs output').textContent"
    )
    page.go("#trace=0&episode=1&step=30")
    page.until("document.querySelectorAll('.tick.note').length === 2")
    page.press("m")
    page.until("document.querySelector('.scrubber').value === '59'")
    page.press("m")  # the first one of the next episode
    page.until("location.hash.includes('episode=2') && document.querySelector('.scrubber').value === '3'")
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'M', shiftKey: true, bubbles: true}))")
    page.until("location.hash.includes('episode=1') && document.querySelector('.scrubber').value === '59'")


def test_a_rectangle_over_two_columns_finds_the_steps_in_it(page):
    page.go("#trace=0")
    page.until("document.querySelectorAll('.space .row').length === 4")
    page.run("document.querySelector('.heat summary').click()")
    page.until("document.querySelector('.heat .note').textContent === '215 steps'")
    page.run(
        "document.body.style.paddingBottom = '2000px'; scrollTo(0, 1000);"  # the list of findings is out of sight
        "const chart = document.querySelector('.heat .chart'), b = chart.getBoundingClientRect();"
        "chart.setPointerCapture = () => {};"
        "const at = (kind, x, y) =>"
        " chart.dispatchEvent(new PointerEvent(kind, {clientX: x, clientY: y, pointerId: 1}));"
        "at('pointerdown', b.left + 1, b.top + 1); at('pointerup', b.right - 1, b.bottom - 1)"
    )
    page.until("/^215 steps in 4 episodes where /.test(document.querySelector('.proofs output').textContent)")
    assert "listed above" in page.text(".toast .note")
    condition = page.run("return document.querySelector('.steps-where').value")
    assert "observation.place[0]" in condition
    assert "observation.place[1]" in condition


SWEEP = """
const over = document.querySelector('[data-column=return] .u-over'), box = over.getBoundingClientRect();
for (let y = 0; y < box.height; y++) for (let x = box.width / 2; x < box.width; x += 9) {
  const send = kind => over.dispatchEvent(new PointerEvent(kind, {clientX: box.left + x, clientY: box.top + y}));
  send('pointermove');
  if (!over.matches('.near')) continue;
  send('pointerdown'), send('pointerup');
  return true;
}
"""


def test_branches_fan_out_from_the_step_and_open_beside_the_recording(driver, tmp_path):
    browser.look(driver)
    with browser.served(cartpoles(tmp_path / "cart", 1)) as served:
        page = Page(driver, served)
        page.go("#trace=0&episode=0&step=4")
        page.until("document.querySelector('.whatif option') && document.querySelector('[data-column=return] canvas')")
        page.run("[...document.querySelectorAll('.whatif button')].find(one => one.textContent === 'Ask').click()")
        page.until("document.querySelector(`[data-column='actions of random actions'].bands canvas`)")
        page.press("i")
        page.run("document.querySelector('.whatif input').value = 3")
        page.run("document.querySelector('.whatif form').requestSubmit()")
        page.until("document.querySelectorAll('.strip .dot').length === 3")
        page.until("document.querySelector('.whatif output').textContent.startsWith('3 branches')")
        page.until(f"(() => {{ {SWEEP} }})()")
        page.until("location.hash.includes('compare=1:') && document.querySelector('.banner.difference')")
        assert "a click opens it" in page.text(".whatif .note")
        strip = "document.querySelector('.strip')"
        for name in ("Home", "ArrowRight", "Enter"):
            page.run(f"{strip}.dispatchEvent(new KeyboardEvent('keydown', {{key: '{name}', bubbles: true}}))")
        wanted = page.run(f"return {strip}.getAttribute('aria-valuetext')").split(":")[0].removeprefix("branch ")
        page.until("/compare=1:(\\d+)/.exec(location.hash)[1] === arguments[0]", wanted)
        page.go("#trace=0&episode=0&step=99999")
        page.until("document.querySelector('.whatif').textContent.includes('choose an earlier step')")
        page.run("document.querySelector('.whatif form').requestSubmit()")
        page.until("document.querySelector('.whatif output.problem').textContent.includes('has ended')")
        page.go("#trace=0")
        page.until("document.querySelector('.proofs output').textContent.startsWith('branch: ')")
        page.fill(".proofs .steps-where", "step >")
        page.run("document.querySelector('.proofs form').requestSubmit()")
        page.until("document.querySelector('.proofs output').textContent.startsWith('steps: ')")
        page.fill(".proofs .steps-where", "step == 0")
        page.run("document.querySelector('.proofs form').requestSubmit()")
        page.until("document.querySelector('.proofs output:not(.problem)').textContent.startsWith('1 step ')")
        assert page.messages() == []


def test_recorded_text_is_shown_and_never_run(page):
    page.go("#trace=0&episode=0&step=5")
    page.until("document.querySelector('.step .values')?.textContent.includes('onerror')")
    assert page.run("return document.querySelectorAll('.step img, .step script').length") == 0


def test_an_unknown_episode_is_an_error_on_the_page(page):
    page.go("#trace=0&episode=99")
    assert page.text(".banner.bad")
    page.was_refused(404)
    page.go("#trace=9&episode=0")
    assert "no trace 9" in page.text(".toast .error")


def test_nothing_is_wider_than_a_phone(page):
    browser.look(page.driver, 390, 844, scale=2)
    for route in ("#trace=0", "#trace=0&episode=0&step=7", "#trace=0&episode=0&compare=1:1"):
        page.go(route)
        page.until("document.querySelector('.space .row, .picture canvas[data-step]')")
        assert page.run("return document.documentElement.scrollWidth") <= 390, route
    page.go("#trace=0")
    page.until("document.querySelectorAll('.space .row').length === 4")
    cut = "(e) => e.offsetWidth && e.scrollWidth > e.offsetWidth"
    page.run("for (const e of document.querySelectorAll('.space .of-return')) e.textContent = '−123,456'")
    assert page.run(f"return [...document.querySelectorAll('.space .cell')].filter({cut}).length") == 0


def test_the_theme_follows_the_system_and_the_key(page):
    browser.look(page.driver, theme="dark")
    page.go("#trace=0")
    page.until("document.documentElement.dataset.theme === 'dark'")
    page.text(".matched")
    page.press("t")
    page.until("document.documentElement.dataset.theme === 'light'")
    page.run("localStorage.removeItem('gym-trace-theme')")


def test_the_token_leaves_the_address_and_reaches_no_other_port(page, driver):
    """A page of another site can lead the browser to a port where another user of this machine listens."""
    token, received = page.address.partition("token=")[2], []
    page.go()
    page.until("document.querySelector('h1')?.textContent === 'Compare'")
    assert token not in driver.current_url

    class Listening(BaseHTTPRequestHandler):
        def do_GET(self):
            received.append(f"{self.path} {self.headers}")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'<!doctype html><link rel="icon" href="data:,">')  # else it is asked for, after the end
            if len(received) == 1:  # a request from this page is one of the same site
                self.wfile.write(b"<script>location = '/again'</script>")

        def log_message(self, *_):
            pass

    with running(Listening) as other:
        driver.get(other)
        end = time.monotonic() + SECONDS
        while not any(line.startswith("/again") for line in received):
            assert time.monotonic() < end
            time.sleep(0.02)
    assert not any(token in line for line in received)
    driver.get(page.address.partition("?")[0])  # another tab has no token in its address
    page.until("document.querySelector('h1')?.textContent === 'Compare'")


def test_a_live_trace_grows_on_the_page(driver, tmp_path):
    browser.look(driver)
    env = recorded(tmp_path / "live", (20,))
    with browser.served(tmp_path / "live") as address:
        page = Page(driver, address)
        page.go()
        page.until("document.querySelector('.matched')?.textContent === '1 episode'")
        env.unwrapped.length = 30
        env.reset(seed=9)
        for _ in range(30):
            env.step(0)
        env.reset(seed=10)
        page.until("/^[23] episodes/.test(document.querySelector('.matched').textContent)")
        env.close()
        assert page.messages() == []
        driver.get("about:blank")


def test_a_saved_page_opens_from_disk(driver, traces, tmp_path):
    target = tmp_path / "page.html"
    ok("view", traces / "first", "-o", target)
    page = Page(driver, target.as_uri())
    page.go()
    page.until("document.querySelectorAll('.space .row').length === 4")
    page.go("#trace=0&episode=0&step=33")
    page.until("document.querySelector('.picture canvas[data-step=\"33\"]')")
    page.until("document.querySelectorAll('.panel canvas').length >= 4")
    page.scrub(80)
    assert page.messages() == []
    assert not page.run("return window.hostile")


REAL = {"ALE/Pong-v5": "ale_py", "HalfCheetah-v5": "mujoco", "MiniGrid-DoorKey-8x8-v0": "minigrid"}


@pytest.mark.parametrize("env_id", REAL)
def test_real_environments_open_with_plots_and_pictures(driver, tmp_path, env_id):
    pytest.importorskip(REAL[env_id])
    words = ["--infos", "--quiet", *([] if REAL[env_id] == "mujoco" else ["--import", REAL[env_id]])]
    ok("record", env_id, "-o", tmp_path / "real", "--steps", 150, "--seed", 0, *words)
    with browser.served(tmp_path / "real") as address:
        page = Page(driver, address)
        page.go("#trace=0&episode=0&step=40")
        page.until("document.querySelectorAll('.panel canvas').length >= 3")
        page.until("document.querySelector('.picture canvas[data-step=\"40\"]')")  # recorded, rendered, or a grid
        if env_id != "HalfCheetah-v5":
            assert page.text(".panel .legend .key")  # a name of an action
        page.until("document.querySelector('.step:not(.waiting) .values .line')")
        assert page.messages() == []
        driver.get("about:blank")


class Board(gym.Env):
    """An array of numbers that a picture shows, and actions with names."""

    observation_space, action_space = Box(0, 3, (5, 6), np.int8), Discrete(2, start=1)

    def get_action_meanings(self):
        return ["stay", HOSTILE]

    def reset(self, *, seed=None, options=None):
        self.board = np.arange(30, dtype=np.int8).reshape(5, 6) % 4
        return self.board, {}

    def step(self, action):
        self.board = np.roll(self.board, 1)
        return self.board, 0.0, False, False, {}


def test_numbers_on_a_grid_are_a_picture_and_actions_are_bands_with_names(driver, tmp_path):
    with TraceRecordingWrapper(Board(), tmp_path / "board") as env:
        env.reset(seed=0)
        for step in range(6):
            env.step(1 + step % 2)
    with opened(driver, tmp_path / "board", "#trace=0&episode=0&step=3") as page:
        page.until("document.querySelector('.picture canvas.enlarged[data-step=\"3\"]')")
        assert page.run("const e = document.querySelector('.picture canvas'); return [e.width, e.height]") == [6, 5]
        colour = page.run("return getComputedStyle(document.documentElement).getPropertyValue('--series-1')").strip()
        pixel = PIXEL.replace("5, 5, 1, 1,", "5, 0, 1, 1,")  # number 5 of the board is 2 at step 3
        assert "#" + "".join(f"{part:02x}" for part in page.run(pixel)) == colour
        keys = page.until("[...document.querySelectorAll('[data-column=actions] .key')].map(e => e.textContent)")
        assert keys == ["stay", HOSTILE]
        page.until("document.querySelector('[data-column=actions] .value').textContent === arguments[0]", HOSTILE)
        page.press("f")
        page.until("document.querySelector('.player.large .picture canvas').clientWidth > 700")
        page.press("Escape")
        page.until("!document.querySelector('.player.large') && document.querySelector('.picture')")
        width = "document.querySelector('.picture').clientWidth"
        before = page.run(f"return {width}")
        key = "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})"
        page.run(f"document.querySelector('.splitter').dispatchEvent({key})")
        page.until(f"{width} > {before}")
        page.run("document.querySelector('[data-column=actions] .choose.pinned').click()")
        page.until("document.querySelector('.group').querySelector('[data-column=actions]')")
        page.run("localStorage.clear()")


@contextlib.contextmanager
def opened(driver, directory, route="#trace=0"):
    """A page of a trace with a server of its own, which must say nothing wrong."""
    browser.look(driver)
    with browser.served(directory) as address:
        page = Page(driver, address)
        page.go(route)
        yield page
        assert page.messages() == []
        assert not page.run("return window.hostile")
        driver.get("about:blank")


def test_a_cut_batch_is_named_by_a_banner_of_the_list(driver, tmp_path):
    recorded(tmp_path / "cut", (100, 70, 40)).close()
    (batch,) = (tmp_path / "cut").glob("*.gtb")
    strip_parity(batch)
    batch.write_bytes(batch.read_bytes()[:-200])
    with opened(driver, tmp_path / "cut") as page:
        assert "damaged part" in page.text(".banner.bad")
        assert batch.name in page.text(".banner.bad li")


def test_a_lost_step_is_unreadable_and_not_nan(driver, tmp_path):
    recorded(tmp_path / "torn", (100, 70)).close()
    (batch,) = (tmp_path / "torn").glob("*.gtb")
    strip_parity(batch)
    ((begin, end),) = chunks_of(batch)
    flip(batch, *range((begin + end) // 2, end - 20, 7))
    with opened(driver, tmp_path / "torn", "#trace=0&episode=0&step=50") as page:
        page.until("document.querySelector('.step')?.textContent.includes('unreadable')")
        assert "NaN" not in page.run("return document.querySelector('.step').textContent")


def test_a_compacted_trace_shows_the_same_episodes(driver, traces, tmp_path):
    shutil.copytree(traces / "first", tmp_path / "small")
    edit.compact(tmp_path / "small", tmp_path / "one")
    with opened(driver, tmp_path / "one") as page:
        page.until("document.querySelectorAll('.space .row').length === 4")
        lengths = page.run("return [...document.querySelectorAll('.space .of-length')].map(e => e.textContent)")
        assert lengths == ["100", "70", "40", "5"]
        page.go("#trace=0&episode=1&step=64")
        page.until("document.querySelector('.picture canvas[data-step=\"64\"]')")
        assert page.run(PIXEL) == [64] * 3


def test_a_vector_trace_names_the_lane_of_each_episode(driver, tmp_path):
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3)
    envs = TraceRecordingVectorWrapper(envs, tmp_path / "lanes")
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(80):
        envs.step(envs.action_space.sample())
    envs.close()
    with opened(driver, tmp_path / "lanes") as page:
        page.until("document.querySelectorAll('.space .row').length > 3")
        assert "3 lanes" in page.text(".numbers")
        assert set(page.run("return [...document.querySelectorAll('.space .of-lane')].map(e => e.textContent)")) == {
            "0",
            "1",
            "2",
        }


def test_a_click_on_none_selects_the_episodes_without_a_flag(driver, traces, tmp_path):
    shutil.copytree(traces / "first", tmp_path / "flagged")
    with opened(driver, tmp_path / "flagged", "#trace=0&episode=1") as page:
        page.until("document.querySelector('.flag-button.good')")
        page.press("g")
        page.until("document.querySelector('.flag-button.good').ariaPressed === 'true'")
        page.press("Escape")
        none = "[...document.querySelectorAll('.named-bars button')].find(e => e.title === 'Select none')"
        page.until(none)
        page.run(f"{none}.click()")
        page.until("document.querySelector('.matched').textContent === '3 of 4 episodes'")
        assert page.run("return document.querySelector('.where').value") == "flag is None"
        page.until(f"{none}.ariaPressed === 'true'")
        page.run(f"{none}.click()")
        page.until("document.querySelector('.matched').textContent === '4 episodes'")


def test_a_file_name_that_wants_to_be_html_is_text(driver, traces, tmp_path):
    name = "<img src=x onerror=window.hostile=1>"
    shutil.copytree(traces / "second", tmp_path / name)
    with opened(driver, tmp_path / name) as page:
        page.until("document.querySelectorAll('.space .row').length === 2")
        assert name in page.text("h1")
        assert page.run("return document.querySelectorAll('img').length") == 0
        page.go("#trace=0&episode=0")
        assert name in page.text(".crumbs")


def test_annotation_names_that_want_to_be_html_are_text(driver, tmp_path):
    with TraceRecordingWrapper(gym.make("CartPole-v1"), tmp_path / "annotated") as env:
        env.reset(seed=0)
        for step in range(5):
            env.step(0)
            env.annotate(**{HOSTILE: float(step), f"{HOSTILE} text": HOSTILE})
    with opened(driver, tmp_path / "annotated", "#trace=0&episode=0&step=3") as page:
        page.until("document.querySelectorAll('.panel canvas').length >= 4")
        names = page.run("return [...document.querySelectorAll('.panel h3')].map(e => e.textContent)")
        assert any(HOSTILE in name.replace('\\"', '"') for name in names), names
        values = page.until("document.querySelector('.step:not(.waiting) .values')?.textContent")
        assert values.count("onerror") >= 3
        assert page.run("return document.querySelectorAll('main img, main script').length") == 0


class Short(VectorEnv):
    """Episodes of one step, a thousand at a time."""

    num_envs = 1000
    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = single_action_space = Discrete(2)
    observation_space = action_space = batch_space(Discrete(2), 1000)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1000, np.int64), {}

    def step(self, actions):
        return np.zeros(1000, np.int64), np.ones(1000), np.ones(1000, bool), np.zeros(1000, bool), {}


def test_the_last_of_many_episodes_is_reached_by_scroll_bar_and_key(driver, tmp_path):
    many = 300_000  # 9 million pixels of rows; the page makes no element taller than 8 million
    envs = TraceRecordingVectorWrapper(Short(), tmp_path / "many")
    envs.reset()
    for _ in range(599):  # every second step is a reset
        envs.step(np.zeros(1000, np.int64))
    envs.close()
    with opened(driver, tmp_path / "many") as page:
        page.until(f"document.querySelector('.matched')?.textContent === '{many:,} episodes'")
        assert page.run("return document.querySelector('.space').offsetHeight") < 17_000_000
        page.run("const e = document.querySelector('.episodes .window'); e.scrollTop = e.scrollHeight")
        last = "[...document.querySelectorAll('.space .row:not(.waiting)')].at(-1)"
        page.until(f"{last}?.querySelector('.of-episode')?.textContent === '{many - 1}'")
        box = page.run(
            f"const row = {last}.getBoundingClientRect(), list = document.querySelector('.episodes .window')"
            ".getBoundingClientRect(); return [row.bottom - list.bottom, row.top - list.top]"
        )
        assert box[0] <= 1, "the last row is in sight"
        assert box[1] >= 0, "the last row is in sight"
        page.run("document.querySelector('.episodes .window').scrollTop = 0")
        key = "document.querySelector('.episodes').dispatchEvent(new KeyboardEvent('keydown', {key: 'END'}))"
        page.run(key.replace("END", "End"))
        page.until(f"document.querySelector('.space .row.active .of-episode')?.textContent === '{many - 1}'")
        page.run(key.replace("END", "Enter"))
        page.until(f"document.querySelector('h1')?.textContent === 'Episode {many - 1}'")


def test_the_grid_shows_last_pictures_in_the_order_of_the_list(page):
    page.go("#trace=0&sort=length")
    page.until("document.querySelectorAll('.space .row').length === 4")
    page.run("document.querySelector('[aria-label=\"Last pictures\"]').click()")
    page.until("document.querySelectorAll('.card canvas').length === 4")
    pixels = PIXEL.replace(".picture canvas", ".card:nth-child(2) canvas")
    assert page.run(pixels) == [40] * 3  # the last step of the second shortest
    page.run("document.querySelector('[aria-label=List]').click()")
    assert not page.run("return document.querySelector('.episodes').hidden")
    page.run("localStorage.removeItem('gym-trace-episodes')")


CODE = """
import gymnasium, numpy
class Asking(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}
    def __init__(self, render_mode=None): self.render_mode = render_mode
    def reset(self, *, seed=None, options=None): super().reset(seed=seed); return 0, {}
    def step(self, action): return 0, 1.0, False, False, {}
    def render(self): return numpy.full((20, 30, 3), 77, numpy.uint8)
gymnasium.register("Asking-v0", "asking:Asking")
"""
RECORD = """
import asking, gymnasium
from gym_trace import TraceRecordingWrapper
with TraceRecordingWrapper(gymnasium.make("Asking-v0"), "trace") as env:
    env.reset(seed=1)
    for _ in range(8): env.step(0)
"""


def test_code_of_a_recording_runs_only_after_consent(driver, tmp_path, monkeypatch):
    (tmp_path / "asking.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forked_python.run([sys.executable, "-c", RECORD], check=True, cwd=tmp_path)
    button = "[...document.querySelectorAll('.render button')].find(e => e.textContent === 'Render')"
    with opened(driver, tmp_path / "trace", "#trace=0&episode=0&step=4") as page:
        for answer in ("Cancel", "Run it"):
            page.until(f"{button} && !{button}.hidden")
            page.run(f"{button}.click()")
            said = page.until("document.querySelector('dialog[open] .consent')?.textContent")
            assert "asking" in said
            assert "trust" in said
            assert page.run("return document.activeElement.textContent") == "Cancel"
            page.run(
                "[...document.querySelectorAll('dialog[open] footer button')].find(e => e.textContent === arguments[0])"
                ".click()",
                answer,
            )
            page.until("!document.querySelector('dialog')")
        page.until("document.querySelector('.picture canvas[data-step=\"4\"]')")
        assert page.run(PIXEL) == [77] * 3
        page.was_refused(409)


DEAF = """
const asked = window.fetch;
window.fetch = (path, ...rest) => path.startsWith('/api/changes') ? new Promise(() => {}) : asked(path, ...rest);
"""


def test_a_flag_from_before_an_edit_is_refused_and_the_list_reloads(driver, traces, tmp_path):
    shutil.copytree(traces / "first", tmp_path / "edited")
    # The page hears of the edit within seconds; this key is pressed before.
    added = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": DEAF})
    with opened(driver, tmp_path / "edited", "#trace=0&episode=1") as page:
        page.until("document.querySelector('.flag-button.good')")
        edit.filter(tmp_path / "edited", episodes=[0, 2, 3], in_place=True)
        page.press("g")
        assert "another one now" in page.text(".toast .error")
        page.until("document.querySelectorAll('.space .row').length === 3")
        assert len(gym_trace.open_trace(tmp_path / "edited").select("flag is not None")) == 0
        page.was_refused(412)
    driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_an_episode_that_an_edit_in_place_replaces_is_loaded_again(driver, traces, tmp_path):
    shutil.copytree(traces / "first", tmp_path / "edited")
    with opened(driver, tmp_path / "edited", "#trace=0&episode=1") as page:
        page.until("document.querySelector('.scrubber')?.max === '70'")
        edit.filter(tmp_path / "edited", episodes=[0, 2, 3], in_place=True)
        page.until("document.querySelector('.scrubber')?.max === '40'")
        assert "another episode now" in page.text(".toast .error")


@pytest.fixture(scope="module")
def site(traces):
    """A host with 30 ms of latency that holds a static site, and a trace that is not part of it."""
    directories = (traces / "second", traces / "first", traces / "second")
    gym_trace.viewer.save_site(*directories, target=traces / "site", settings=["one", "two", "one"])
    with hosted(traces) as web:
        yield web


@contextlib.contextmanager
def hosted(root):
    """A host with 30 ms of latency that holds the files below a folder, among them a site in site/."""
    types = {"": "text/html", "app.js": "text/javascript", "site.js": "text/javascript", "app.css": "text/css"}
    with serving(latency=0.03) as web:
        for path in root.rglob("*.*"):
            web.files[f"/{path.relative_to(root)}"] = path.read_bytes()
        for name, mime in types.items():
            data = web.files[f"/site/{name or 'index.html'}"]
            web.answers[f"/site/{name}"] = partial(
                QuietHandler.answer, status=200, body=data, headers={"Content-Type": mime}
            )
        yield web


@pytest.fixture
def site_page(driver, site):
    browser.look(driver)
    page = Page(driver, f"{site.url}/site/")
    yield page
    assert page.messages() == []
    assert not page.run("return window.hostile")


def test_a_static_site_plays_without_a_server(site, site_page):
    site_page.go("#trace=0&episode=0&step=3")
    site_page.until("document.querySelector('canvas[data-step=\"3\"]')")
    site_page.scrub(64)
    assert site_page.run(PIXEL) == [64] * 3
    site_page.until("document.querySelector('.step:not(.waiting) .values').textContent.includes('32.5')")
    assert HOSTILE in site_page.text(".values")
    asked = {path for _, path, _ in site.requests}
    assert not any(path.startswith(("/api", "/first")) for path in asked)
    assert all(kept for _, path, kept in site.requests if path.endswith(".gtb"))  # byte ranges alone
    site_page.go("#trace=0&where=steps > 50&sort=-return")
    site_page.until("document.querySelector('.matched').textContent === '1 of 2 episodes'")
    site_page.until("document.querySelector('.filter-lines').textContent.includes('no What if')")
    site_page.fill(".where", "metadata.x > 1")
    assert "'gym-trace view'" in site_page.until("document.querySelector('.problem:not([hidden])').textContent")


def test_a_static_site_opens_on_the_comparison_that_was_written_with_it(site_page):
    site_page.go()
    rows = site_page.until(RUNS)
    assert [row.split()[0] for row in rows] == ["one", "two"]
    site_page.run("document.querySelectorAll('.runs-table .run')[1].click()")
    site_page.until(
        "location.hash.includes('trace=2') && document.querySelectorAll('.learning .names span').length === 2"
    )


def test_a_static_site_fetches_only_the_blocks_of_an_episode(driver, tmp_path):
    trace = compacted_noise(tmp_path / "site" / "noise")
    gym_trace.viewer.save_site(trace, target=tmp_path / "site")
    (path,) = trace.glob("*.gtb")
    ((begin, end),) = chunks_of(path)
    rows = {0: RowRanges([(2 * 1001, 3 * 1001)], [(2 * 1000, 3 * 1000)])}
    expected = {"head, with starts": 4096}
    for column in ("observations", "actions", "rewards"):
        expected[column] = sum(span.length for span in batch_reader(path).spans(rows, {(column,)}.__contains__))
    assert 3 * expected["observations"] < end - begin
    with hosted(tmp_path) as web:
        page = Page(driver, f"{web.url}/site/")
        page.go("#trace=0&episode=2&step=999")
        value = f"{open_trace(trace)[2].observations[999][0]:.4g}"
        page.until("document.querySelector('.step:not(.waiting) .values').textContent.includes(arguments[0])", value)
        ranges = [tuple(map(int, kept[6:].split("-"))) for _, name, kept in web.requests if name.endswith(".gtb")]
    assert sum(last + 1 - first for first, last in ranges if begin <= first < end) == sum(expected.values())


def test_a_link_names_a_trace_elsewhere_for_a_static_site(site, site_page):
    site_page.address += "?t=/first/"
    site_page.go("#trace=0")
    site_page.until("document.querySelectorAll('.episodes .space .row').length === 4")
    assert site_page.text("h1") == "first"


def test_a_static_site_on_a_host_without_ranges_says_so(site, site_page):
    site.has_ranges = False
    site_page.go()
    assert "does not serve byte ranges" in site_page.text("#app .empty")
    site.has_ranges = True
