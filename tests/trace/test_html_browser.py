"""The HTML page of a trace in a real browser: mouse, keys, search, clocks, and nothing from the network."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simparallel as sp

webdriver = pytest.importorskip("selenium.webdriver")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver"),
    pytest.mark.filterwarnings("ignore"),  # selenium's own
]
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1200,800",
)  # fmt: skip
SIZE = {"width": 1200, "height": 800, "deviceScaleFactor": 1, "mobile": False}


def program() -> None:
    """Two steps of two layers, a collective and a message each."""
    model = sp.nn.Sequential(sp.nn.Linear(8, 64), sp.nn.ReLU(), sp.nn.Linear(64, 4))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    payload = np.zeros(1 << 14, np.float32)
    for _ in range(2):
        with sp.record_function("forward <b>"):
            loss = model(sp.Tensor(np.ones((16, 8), np.float32))).sum()
        loss.backward()
        sp.all_reduce(payload)
        if sp.get_rank() == 0:
            sp.send(payload, 1)
        else:
            sp.recv(payload, 0)
        optimizer.step()


class Page:
    """The page in the browser; names of its script are looked up as the script itself does."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def ask(self, code: str, *values: Any) -> Any:
        # Two frames later what was asked for is drawn.
        start = "const done = arguments[arguments.length - 1]; const tell = () => done(result);"
        wait = "requestAnimationFrame(() => requestAnimationFrame(tell));"
        return self.driver.execute_async_script(
            f"{start} const given = [...arguments]; const result = (() => {{ {code} }})(); {wait}", *values
        )

    def press(self, *keys: str) -> None:
        self.ask("canvas.focus()")
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()
        self.ask("")

    def type(self, text: str) -> None:
        field = self.driver.find_element("id", "search")
        field.clear()
        field.send_keys(text)
        self.ask("")

    def errors(self) -> list[Any]:
        """Return what stands in the console, without advice on reading pixels, which only tests do."""
        return [entry for entry in self.driver.get_log("browser") if entry["source"] != "rendering"]

    def text(self, name: str) -> str:
        return self.driver.find_element("id", name).text

    def event(self, name: str, rank: int = 0) -> int:
        code = """const [told, rank] = given, all = [...Array(count).keys()];
            return all.find((i) => data.names[name[i]] === told && data.rows[row[i]].rank === rank)"""
        return self.ask(code, name, rank)

    def pixel(self, x: float, y: float) -> list[int]:
        return self.ask("return [...pen.getImageData(given[0], given[1], 1, 1).data].slice(0, 3)", x, y)

    def middle(self, event: int) -> tuple[int, int]:
        code = "const box = boxOf(given[0]); return [box.x + box.w / 2, box.y + box.h / 2]"
        x, y = self.ask(code, event)
        return round(x), round(y)

    def hover(self, event: int) -> None:
        x, y = self.middle(event)
        element = self.driver.find_element("id", "canvas")
        left, top = self.ask("const box = canvas.getBoundingClientRect(); return [box.left, box.top]")
        chain = webdriver.ActionChains(self.driver)
        chain.w3c_actions.pointer_action.move_to_location(round(left + x), round(top + y))
        chain.perform()
        assert element.is_displayed()
        self.ask("")

    def seen(self) -> tuple[float, float]:
        start, end = self.ask("return [state.from, state.to]")
        return start, end

    def span(self) -> float:
        start, end = self.seen()
        return end - start


@pytest.fixture(scope="module")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Page]]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(20)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SIZE)
    # Forget the requests of the browser's own first page.
    driver.get("about:blank")
    driver.get_log("performance")
    path = tmp_path_factory.mktemp("page") / "trace.html"

    def show(text: str) -> Page:
        path.write_text(text)
        driver.get(path.as_uri())
        return Page(driver)

    yield show
    driver.quit()


@pytest.fixture(scope="module")
def text() -> str:
    return sp.launch(program, world_size=2, transport="inline", record="full").trace.html()


@pytest.fixture
def page(open_page: Callable[[str], Page], text: str) -> Iterator[Page]:
    page = open_page(text)
    yield page
    assert page.errors() == []
    requests = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    asked = {r["params"]["request"]["url"] for r in requests if r["method"] == "Network.requestWillBeSent"}
    assert all(url.startswith(("file:", "data:")) for url in asked), asked


def test_rows_are_ranks_and_streams(page: Page) -> None:
    rows = page.ask("return data.rows.map((row) => `${row.rank} ${row.name}`)")
    assert rows == [
        "0 marks", "0 compute", "0 comm world", "0 send to 1", "1 marks", "1 compute", "1 comm world", "1 recv from 0",
    ]  # fmt: skip
    # Each row has drawn something of its kind: the middle of its longest event has the colour of its kind.
    for row in range(len(rows)):
        event = page.ask(
            """const of = eventsOfRow(given[0]), { start, end } = CLOCKS.sim;
            return of.reduce((a, b) => (end[b] - start[b] > end[a] - start[a] ? b : a))""",
            row,
        )
        page.ask("reveal(given[0], true)", event)
        x, y = page.middle(event)
        # Beside the text and off the hatching.
        found = page.ask(
            """const at = pen.getImageData(given[0], given[1], 12, 12).data, seen = new Set();
            for (let i = 0; i < at.length; i += 4) seen.add([at[i], at[i + 1], at[i + 2]].join());
            return [...seen]""",
            x + 40,
            y - 6,
        )
        colour = page.ask("return data.kinds[kind[given[0]]].colour", event)
        wanted = ",".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
        assert wanted in found


def test_zoom_and_pan_by_keys(page: Page) -> None:
    whole = page.span()
    page.press("w", "w")
    assert page.span() == pytest.approx(whole * 0.49)
    before = page.seen()
    page.press("d")
    assert page.seen()[0] == pytest.approx(before[0] + 0.2 * (before[1] - before[0]))
    page.press("a", "s", "s")
    page.press("f")
    assert page.span() == pytest.approx(whole)


def test_wheel_zooms_at_the_pointer(page: Page) -> None:
    event = page.event("all_reduce")
    page.hover(event)
    x, _ = page.middle(event)
    time = page.ask("return timeOf(given[0])", x)
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_viewport(x, 300)
    webdriver.ActionChains(page.driver).scroll_from_origin(origin, 0, -400).perform()
    assert page.ask("return timeOf(given[0])", x) == pytest.approx(time, abs=page.span() / 500)
    assert page.span() < 0.7 * page.ask("return CLOCKS.sim.last")


def test_drag_pans(page: Page) -> None:
    page.press("w", "w")
    before, canvas = page.seen(), page.driver.find_element("id", "canvas")
    webdriver.ActionChains(page.driver).drag_and_drop_by_offset(canvas, -200, 0).perform()
    moved = 200 * (before[1] - before[0]) / page.ask("return width - GUTTER")
    assert page.seen()[0] - before[0] == pytest.approx(moved, rel=0.05)
    assert page.text("details") == ""


def test_hover_shows_facts_of_both_clocks(page: Page) -> None:
    event = page.event("all_reduce")
    page.ask("reveal(given[0], true)", event)
    page.hover(event)
    told = page.text("tip")
    for fact in ("all_reduce", "collective, step 0", "ranks 0–1", "partners", "65.5 kB", "simulated", "wall", "number"):
        assert fact.replace("0–1", "0, 1") in told
    layered = page.ask("return [...Array(count).keys()].find((i) => layer[i])")
    page.ask("reveal(given[0], true)", layered)
    page.hover(layered)
    assert "layer" in page.text("tip")


def test_marks_keep_their_text(page: Page) -> None:
    """A name with markup is a name."""
    event = page.event("forward <b>")
    page.ask("reveal(given[0], true)", event)
    page.hover(event)
    assert "forward <b>" in page.text("tip")


def test_ends_are_connected(page: Page) -> None:
    """An arrow to the receiver, a band between the members of a collective: pixels between the rows change."""
    for name in ("send", "all_reduce"):
        event = page.event(name)
        page.ask("reveal(given[0], true)", event)
        _, y = page.middle(event)
        _, low = page.middle(page.ask("return members.get(call[given[0]])[1]", event))
        column = """const at = pen.getImageData(GUTTER + 1, given[0], width - GUTTER - 1, 1).data;
            return at.join()"""
        between = (y + low) // 2
        before = page.ask(column, between)
        page.ask("select(given[0])", event)
        assert page.ask(column, between) != before
        page.press("\ue00c")
        assert page.ask(column, between) == before


def test_search_dims_and_steps(page: Page) -> None:
    page.type("relu")
    count = page.ask("return state.matches.length")
    assert page.text("matches") == f"{count} matches"
    assert count >= 8
    page.driver.find_element("id", "search").send_keys("\n")
    assert page.text("matches") == f"1 of {count}"
    assert "ReLU" in page.text("details")
    page.press("n")
    assert page.text("matches") == f"2 of {count}"
    page.press("N", "N")
    assert page.text("matches") == f"{count} of {count}"
    assert page.ask("return shown.filter((k) => k !== DIM).length") == count
    page.type("0")
    assert page.ask("return state.matches.some((i) => data.layers[layer[i]] === '0')")
    page.type("nothing at all")
    assert page.text("matches") == "0 matches"


def test_clock_switch(page: Page) -> None:
    page.driver.find_element("id", "wall").click()
    assert page.ask("return state.clock") == "wall"
    assert page.driver.find_element("id", "wall").get_attribute("aria-pressed") == "true"
    assert page.span() == pytest.approx(1.01 * page.ask("return CLOCKS.wall.last"))
    page.press("c")
    assert page.ask("return state.clock") == "sim"


def test_view_stays_inside_the_run(page: Page) -> None:
    for keys in ("a", "aaa", "waaaaa", "ssss", "wwaaaaaaaaaa"):
        page.press(*keys)
        assert page.seen()[0] >= 0
    page.press(*"dddddddddddd")
    start, end = page.seen()
    last = page.ask("return CLOCKS.sim.last")
    assert last <= end <= last + 0.0101 * (end - start)


def test_keyboard_alone(page: Page) -> None:
    """Select, walk along the row and to another one, zoom in, and hear each event."""
    page.press("\ue014")
    first = page.ask("return state.selected")
    assert first >= 0
    told = page.text("details")
    assert told.startswith(page.ask("return data.names[name[state.selected]]"))
    page.press("\ue015")
    page.press("\ue014", "\ue014")
    second = page.ask("return state.selected")
    assert page.ask("return row[given[0]]", second) == page.ask("return row[given[0]]", first) + 1
    assert page.text("details") != told
    page.press("\ue013")
    assert page.ask("return row[state.selected] === row[given[0]]", first)
    before = page.span()
    page.press("\ue007")
    assert page.span() < before
    assert page.driver.find_element("id", "details").get_attribute("aria-live") == "polite"
    page.press("?")
    assert page.driver.find_element("id", "keys").is_displayed()
    webdriver.ActionChains(page.driver).send_keys("\ue00c").perform()
    assert not page.ask("return byId('keys').open")


def test_tab_goes_through_the_controls(page: Page) -> None:
    found = []
    for _ in range(14):
        webdriver.ActionChains(page.driver).send_keys("\ue004").perform()
        found.append(page.ask("return document.activeElement.id"))
    wanted = [
        "sim", "wall", "search", "previous", "next", "out", "in", "fit", "path", "totals", "theme", "help", "canvas",
    ]  # fmt: skip
    assert [name for name in found if name in wanted][: len(wanted)] == wanted


def test_path_totals_and_themes(page: Page) -> None:
    page.press("p")
    assert page.text("details").startswith("critical path: ")
    assert page.ask("return shown.filter((k) => k !== DIM).length") == page.ask("return data.path.length")
    page.press("t")
    assert "exposed" in page.text("table")
    light = page.pixel(600, 5)
    page.press("l")
    assert sum(page.pixel(600, 5)) != sum(light)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.press("l")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    page.ask("")
    assert page.ask("return state.theme") == "dark"
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_empty_page(open_page: Callable[[str], Page]) -> None:
    from simparallel.machine.cluster import describe
    from simparallel.trace import Trace

    page = open_page(Trace([], describe(1)).html())
    page.press("\ue014", "\ue007", "w", "c", "p", "f", "t", "n")
    assert page.errors() == []


def test_frame_of_a_notebook(open_page: Callable[[str], Page], tmp_path: Path) -> None:
    results = sp.launch(program, world_size=2, transport="inline")
    page = open_page(f"<!DOCTYPE html><html><head><link rel='icon' href='data:,'></head>{results._repr_html_()}")
    frame = page.driver.find_element("tag name", "iframe")
    page.driver.switch_to.frame(frame)
    assert page.ask("return count") == len(results.trace)
    assert "forward" in page.text("legend")
    page.driver.switch_to.default_content()
    assert page.errors() == []


def steps_of_a_rank(count: int, names: tuple[str, ...]) -> str:
    """The page of a trace with events of equal length in a row; each step takes thrice as long by the wall clock."""
    from simparallel.clock.event import Event
    from simparallel.machine.cluster import describe
    from simparallel.trace import Trace

    events = [
        Event(0, "comm", name, "collective", step, 900 * at, 900 * at + 900, 300 * at, 300 * at + 300, 0, 0, 0, (), -1)
        for step in range(count)
        for at, name in enumerate(names, step * len(names))
    ]  # fmt: skip
    return Trace(events, describe(1)).html()


def test_long_run_opens_at_two_steps(open_page: Callable[[str], Page]) -> None:
    """The second and the third one, on both clocks; the rest is one key away, and the hint says so."""
    seen = "return stepsSeen().map((one) => one.number)"
    page = open_page(steps_of_a_rank(200, ("a", "b")))
    assert page.ask(seen) == [1, 2]
    assert page.text("hint").startswith("Steps 1 to 2 of 0 to 199; “fit” shows all.")
    for _ in range(3):
        page.press("c")
        assert page.ask(seen) == [1, 2]
    page.press("f")
    assert len(page.ask(seen)) == 200
    page.press("c")
    assert page.span() == pytest.approx(1.01 * page.ask("return CLOCKS[state.clock].last"))
    few = open_page(steps_of_a_rank(3, ("a", "b")))
    assert few.ask(seen) == [0, 1, 2]
    assert few.text("hint").startswith("Arrow keys")


def test_short_names_stay_distinct(open_page: Callable[[str], Page]) -> None:
    names = (
        "all_reduce",
        "all_gather",
        "all_to_all",
        "reduce",
        "reduce_scatter",
        "broadcast",
        "MatMul",
        "MatMul.backward",
    )
    page = open_page(steps_of_a_rank(1, names))
    code = """pen.font = colours.font;
        return [...Array(count).keys()].map((i) => label(i, given[0]))"""
    found = [page.ask(code, room) for room in range(4, 130, 3)]
    for texts in found:
        # Beside the last two, whose colours differ.
        written = [text for text in texts[:-1] if text]
        assert len(set(written)) == len(written), texts
    assert found[0] == [""] * len(names)
    assert found[-1] == list(names)
    assert any(texts[0] != names[0] and texts[0] and texts[1] for texts in found)


def test_thin_events_are_shares(open_page: Callable[[str], Page]) -> None:
    """20,000 events in 1,000 pixels: half of the time is forward, a quarter backward, a quarter idle."""
    from simparallel.clock.event import Event
    from simparallel.machine.cluster import describe
    from simparallel.trace import Trace

    events = [
        Event(0, "compute", "op", kind, 0, at, at + 1, start, start + length, 0, 0, 0, (), -1)
        for at in range(10_000)
        for kind, start, length in (("forward", 4000 * at, 2000), ("backward", 4000 * at + 2000, 1000))
    ]
    page = open_page(Trace(events, describe(1)).html())
    x, y = page.ask("const box = boxOf(count / 2 | 0); return [box.x, box.y, box.h]")[:2]
    tall = page.ask("return LANE - 4")
    column = [tuple(page.pixel(x, y + i)) for i in range(round(tall))]
    shares = [column.count(colour) / len(column) for colour in ((0x56, 0xB4, 0xE9), (0xE6, 0x9F, 0x00))]
    assert shares == pytest.approx([0.5, 0.25], abs=0.1)
    assert page.ask("return boxes.reduce((sum, box) => sum + box.length / 4, 0)") < 5000
    assert page.errors() == []
