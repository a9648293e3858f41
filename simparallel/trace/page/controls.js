// --- choosing events ------------------------------------------------------------------------------------------------

// The event at a point: the one that is there, or the longest within two pixels.
function eventAt(x, y) {
  if (x < GUTTER || y < RULER) return -1;
  const place = places.find((one) => one.row !== undefined && y >= yOf(one) && y < yOf(one) + LANE);
  if (!place) return -1;
  const lanes = CLOCKS[state.clock].rows[place.row], h = (LANE - 4) / lanes.length;
  const lane = lanes[Math.min(lanes.length - 1, Math.max(0, Math.floor((y - yOf(place) - 2) / h)))];
  const time = timeOf(x), near = 2 / scale();
  const first = after(lane.ends, time - near - 1e-9), last = atLeast(lane.starts, time + near);
  let best = -1, length = -1;
  for (let at = Math.max(0, first - 1); at < Math.min(last, first + 500); at++) {
    if (lane.ends[at] < time - near) continue;
    const isInside = lane.starts[at] <= time && time < lane.ends[at];
    const long = lane.ends[at] - lane.starts[at] + (isInside ? 1e18 : 0);
    if (long > length) { best = lane.events[at]; length = long; }
  }
  return best;
}
function select(i) {
  state.selected = i;
  byId("details").textContent = i < 0 ? "" : sentence(i);
  if (i >= 0) reveal(i);
  redraw();
}
// The events of a row in order of time, over all of its lanes.
function eventsOfRow(number) {
  const clock = CLOCKS[state.clock];
  clock.order ??= [];
  return clock.order[number] ??= clock.rows[number].flatMap((lane) => lane.events)
    .sort((a, b) => clock.start[a] - clock.start[b] || clock.end[a] - clock.end[b] || a - b);
}
function nearestInRow(number, time) {
  const events = eventsOfRow(number), starts = CLOCKS[state.clock].start;
  let low = 0, high = events.length;
  while (low < high) { const mid = (low + high) >> 1; if (starts[events[mid]] <= time) low = mid + 1; else high = mid; }
  return events[Math.max(0, low - 1)];
}
function firstVisible() {
  for (const place of places) {
    if (place.row === undefined || yOf(place) < RULER || yOf(place) + LANE > height) continue;
    const found = eventsOfRow(place.row).find((i) => CLOCKS[state.clock].end[i] > state.from);
    if (found !== undefined) return found;
  }
  return count ? 0 : -1;
}
function move(across, down) {
  if (!count) return;
  if (state.selected < 0) { select(firstVisible()); return; }
  const number = row[state.selected];
  if (across) {
    const events = eventsOfRow(number), at = events.indexOf(state.selected) + across;
    if (at >= 0 && at < events.length) select(events[at]);
  } else if (number + down >= 0 && number + down < data.rows.length) {
    select(nearestInRow(number + down, CLOCKS[state.clock].start[state.selected]));
  }
}

// --- search ---------------------------------------------------------------------------------------------------------

function search(text) {
  const wanted = text.trim().toLowerCase();
  const among = (list) => Uint8Array.from(list, (one) => (one.toLowerCase().includes(wanted) ? 1 : 0));
  state.matches = null;
  if (wanted) {
    const names = among(data.names), layers = among(data.layers), starts = CLOCKS[state.clock].start;
    state.isMatch = Uint8Array.from(name, (one, i) => names[one] | layers[layer[i]]);
    state.matches = Array.from({ length: count }, (_, i) => i).filter((i) => state.isMatch[i])
      .sort((a, b) => starts[a] - starts[b] || row[a] - row[b]);
  }
  const found = state.matches?.length;
  byId("matches").textContent = !wanted ? "" : found === 1 ? "1 match" : `${found} matches`;
  classify();
  redraw();
}
function nextMatch(by) {
  const found = state.matches;
  if (!found?.length) return;
  const at = found.indexOf(state.selected);
  const next = at < 0 ? (by > 0 ? 0 : found.length - 1) : (at + by + found.length) % found.length;
  select(found[next]);
  byId("matches").textContent = `${next + 1} of ${found.length}`;
}

// --- switches -------------------------------------------------------------------------------------------------------

function setClock(which) {
  const before = CLOCKS[state.clock], share = (state.to - state.from) / before.last, seen = stepsSeen();
  state.clock = which;
  byId("sim").setAttribute("aria-pressed", which === "sim");
  byId("wall").setAttribute("aria-pressed", which === "wall");
  search(byId("search").value);
  const clock = CLOCKS[which];
  if (state.selected >= 0 && share < 1) {
    const middle = (clock.start[state.selected] + clock.end[state.selected]) / 2;
    look(middle - share * clock.last / 2, middle + share * clock.last / 2);
  } else if (seen.length < clock.steps.length) {
    const numbers = new Set(seen.map((one) => one.number));
    lookAt(clock.steps.filter((one) => numbers.has(one.number)));
  } else fit();
}
function setPath(on) {
  state.path = on;
  byId("path").setAttribute("aria-pressed", on);
  byId("details").textContent = on ? data.path_text : "";
  classify();
  redraw();
}
function setTotals(on) {
  byId("table").hidden = !on;
  byId("totals").setAttribute("aria-pressed", on);
  resize();
}
const hatch = (() => {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const own = tile.getContext("2d");
  own.strokeStyle = "rgba(255, 255, 255, 0.55)";
  own.lineWidth = 1.3;
  for (const by of [-6, 0, 6]) { own.beginPath(); own.moveTo(by, 6); own.lineTo(by + 6, 0); own.stroke(); }
  return pen.createPattern(tile, "repeat");
})();
function setTheme(theme) {
  state.theme = document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "light" : "dark";
  const style = getComputedStyle(document.documentElement);
  const names = ["back", "text", "faint", "line", "lane", "panel", "accent", "mark", "dim", "ink",
    "band"];
  colours = Object.fromEntries(names.map((what) => [what, style.getPropertyValue(`--${what}`).trim()]));
  const family = getComputedStyle(document.body).fontFamily;
  Object.assign(colours, { font: `12px ${family}`, small: `11px ${family}`, bold: `bold 13px ${family}` });
  redraw();
}
function resize() {
  width = view.clientWidth;
  height = view.clientHeight;
  GUTTER = width < 600 ? 116 : 176;
  arrange(height - RULER - 8);
  byId("space").style.height = `${Math.max(bottom + RULER + 8, height)}px`;
  width = view.clientWidth;  // a scroll bar may have come
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  redraw();
}

// --- mouse, touch and keys ------------------------------------------------------------------------------------------

function showTip(i, x, y) {
  const tip = byId("tip");
  tip.hidden = i < 0;
  if (i < 0) return;
  const list = document.createElement("dl");
  for (const [what, text] of facts(i)) list.append(make("dt", what), make("dd", text));
  tip.replaceChildren(make("b", data.names[name[i]]), list);
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 16, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height < innerHeight ? y + 18 : Math.max(4, y - box.height - 12)}px`;
}
const pointers = new Map();
let dragged = 0;
function local(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, [event.clientX, event.clientY]);
  if (pointers.size === 1) dragged = 0;
  canvas.focus({ preventScroll: true });
});
canvas.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId), [x, y] = local(event);
  if (!before) {
    const found = eventAt(x, y);
    if (found !== state.hovered) { state.hovered = found; redraw(); }
    canvas.style.cursor = found >= 0 ? "pointer" : "default";
    showTip(found, event.clientX, event.clientY);
    return;
  }
  showTip(-1);
  const dx = event.clientX - before[0], dy = event.clientY - before[1];
  if (pointers.size === 1) {
    dragged += Math.abs(dx) + Math.abs(dy);
    if (dragged > 3) { pan(-dx / (width - GUTTER)); view.scrollTop -= dy; canvas.style.cursor = "grabbing"; }
  } else {
    const [[, other]] = [...pointers].filter(([id]) => id !== event.pointerId);
    const was = Math.abs(before[0] - other[0]), is = Math.abs(event.clientX - other[0]);
    dragged += Math.abs(dx) + Math.abs(dy);
    if (was > 4 && is > 4) zoom(was / is, other[0] - canvas.getBoundingClientRect().left);
  }
  pointers.set(event.pointerId, [event.clientX, event.clientY]);
});
for (const end of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(end, (event) => {
    pointers.delete(event.pointerId);
    if (end === "pointerup" && dragged <= 3) select(eventAt(...local(event)));
    canvas.style.cursor = "default";
  });
}
canvas.addEventListener("pointerleave", () => { state.hovered = -1; showTip(-1); redraw(); });
canvas.addEventListener("wheel", (event) => {
  // Inside of another page, such as a notebook, the wheel scrolls that page until the timeline is clicked.
  if (window.parent !== window && document.activeElement !== canvas) return;
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 16 : 1;
  const isAcross = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (isAcross) pan((event.deltaX || event.deltaY) * lines / (width - GUTTER));
  else zoom(Math.exp(event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.0015)), Math.max(GUTTER, local(event)[0]));
}, { passive: false });
view.addEventListener("scroll", redraw);

const KEYS = {
  ArrowLeft: (e) => (e.shiftKey ? pan(-0.2) : move(-1, 0)), ArrowRight: (e) => (e.shiftKey ? pan(0.2) : move(1, 0)),
  ArrowUp: () => move(0, -1), ArrowDown: () => move(0, 1),
  PageUp: () => view.scrollBy(0, -height * 0.8), PageDown: () => view.scrollBy(0, height * 0.8),
  Enter: () => (state.selected < 0 ? select(firstVisible()) : reveal(state.selected, true)), Escape: () => select(-1),
};
const LETTERS = {
  w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
  a: () => pan(-0.2), d: () => pan(0.2), f: fit, n: () => nextMatch(1), N: () => nextMatch(-1),
  "/": () => byId("search").focus(), c: () => setClock(state.clock === "sim" ? "wall" : "sim"),
  p: () => setPath(!state.path), t: () => setTotals(byId("table").hidden),
  l: () => setTheme(state.theme === "dark" ? "light" : "dark"), "?": () => byId("keys").showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open || event.target === byId("search")) return;
  // Buttons keep their own keys, such as Enter; letters are for the whole page.
  const isOnPage = event.target === canvas || event.target === document.body;
  const action = LETTERS[event.key] ?? (isOnPage ? KEYS[event.key] : undefined);
  if (!action) return;
  event.preventDefault();
  action(event);
});
byId("search").addEventListener("input", (event) => search(event.target.value));
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") nextMatch(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") { event.target.value = ""; search(""); canvas.focus(); }
});
for (const [id, action] of Object.entries({
  sim: () => setClock("sim"), wall: () => setClock("wall"), previous: () => nextMatch(-1), next: () => nextMatch(1),
  in: LETTERS.w, out: LETTERS.s, fit, path: LETTERS.p, totals: LETTERS.t, theme: LETTERS.l, help: LETTERS["?"],
})) byId(id).addEventListener("click", action);
addEventListener("resize", resize);

// --- start ----------------------------------------------------------------------------------------------------------

byId("title").textContent = data.title;
byId("wall").title = `Times ${data.measured} (c)`;
canvas.setAttribute("aria-label", `${data.title}: timeline of ${count} events of ${data.shares.sim.length} ranks`);
byId("path").disabled = !data.path.length;
for (const [head, entries] of [
  ["events", data.kinds.filter((one) => data.present.includes(one.id))],
  ["memory", data.memory.categories.map((name, i) => ({ name, colour: data.memory.colours[i] }))],
]) {
  if (entries.length) byId("legend").append(make("b", head));
  for (const { name, colour, hatched } of entries) {
    const entry = make("span", name);
    entry.className = hatched ? "hatched" : "";
    entry.style.setProperty("--kind", colour);
    byId("legend").append(entry);
  }
}
{
  const table = document.createElement("table");
  data.totals.forEach((cells, at) => {
    const line = table.insertRow();
    for (const text of cells) line.append(make(at ? "td" : "th", text));
  });
  byId("table").append(table, ...data.notes.map((note) => make("p", note)));
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const followSystem = () => setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", followSystem);
followSystem();
classify();
resize();
showFew();
if (stepsSeen().length < CLOCKS.sim.steps.length) {
  const [first, last] = [stepsSeen()[0], stepsSeen().at(-1)].map((one) => one.number);
  byId("hint").prepend(`Steps ${first} to ${last} of ${CLOCKS.sim.steps[0].number} to ${CLOCKS.sim.steps.at(-1).number}; “fit” shows all. `);
}
