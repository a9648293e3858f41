// --- the view -------------------------------------------------------------------------------------------------------

const RULER = 34, HEAD = 26, GAP = 6;
let GUTTER = 176, LANE = 24, MEMORY = 48;  // narrower on a phone; taller where there is room
const state = {
  clock: "sim", from: 0, to: 1, selected: -1, hovered: -1, path: false, matches: null, isMatch: null, theme: "light",
};
let width = 0, height = 0, colours = {}, queued = false;
const frames = [];  // milliseconds of the last frames

// The places of everything that is drawn, from the top: {y, height, rank | row | track}.
let places = [], placeOfRow = [], bottom = 0;
function arrange(room) {
  const build = (stretch) => {
    [LANE, MEMORY] = [Math.round(24 * stretch), Math.round(48 * stretch)];
    places = [];
    bottom = 0;
    const put = (height, what) => { places.push({ y: bottom, height, ...what }); bottom += height; };
    data.rows.forEach(({ rank }, i) => {
      if (data.rows[i - 1]?.rank !== rank) { bottom += i ? GAP : 0; put(HEAD, { rank }); }
      put(LANE, { row: i });
      if (data.rows[i + 1]?.rank === rank) return;
      for (const track of data.memory.tracks) if (track.rank === rank) put(MEMORY, { track });
    });
  };
  build(1);
  const fixed = places.filter((place) => place.rank !== undefined).length * (HEAD + GAP);
  if (bottom < room) build(Math.min(1.7, (room - fixed) / Math.max(1, bottom - fixed)));
  placeOfRow = [];
  for (const place of places) if (place.row !== undefined) placeOfRow[place.row] = place;
}

const scale = () => (width - GUTTER) / (state.to - state.from);
const xOf = (time) => GUTTER + (time - state.from) * scale();
const timeOf = (x) => state.from + (x - GUTTER) / scale();
let scrolled = 0;  // view.scrollTop at the last frame: asking for it costs a layout
const yOf = (place) => RULER + place.y - scrolled;
// Where an event is drawn: a row with several lanes shares its height between them.
function boxOf(i) {
  const clock = CLOCKS[state.clock], place = placeOfRow[row[i]], lanes = clock.rows[row[i]];
  const h = (LANE - 4) / lanes.length;
  const w = (clock.end[i] - clock.start[i]) * scale();
  return { x: xOf(clock.start[i]), w, y: yOf(place) + 2 + clock.lane[i] * h, h };
}

// What is seen lies between the start of the run and a little after its end.
function look(from, to) {
  const { last } = CLOCKS[state.clock], room = 0.01;
  const span = Math.min(Math.max(to - from, Math.min(20, last)), last * (1 + room));
  state.from = Math.max(0, Math.min((from + to - span) / 2, last - span * (1 - room)));
  state.to = state.from + span;
  redraw();
}
const fit = () => look(0, CLOCKS[state.clock].last * 1.01);
function lookAt(steps) {
  const from = Math.min(...steps.map((one) => one.from)), to = Math.max(...steps.map((one) => one.to));
  const room = (to - from) * 0.01;
  look(from - room, to + room);
}
// In all steps of a long run no event is visible. The first step also starts things, so the next ones are typical.
const FEW = 3;
function showFew() {
  const { steps } = CLOCKS[state.clock];
  if (steps.length <= FEW) fit();
  else lookAt(steps.slice(1, FEW));
}
// Those of which at least the middle is seen, or else the one in the middle of the view.
function stepsSeen() {
  const { steps } = CLOCKS[state.clock], middle = (state.from + state.to) / 2;
  const found = steps.filter(({ from, to }) => state.from <= (from + to) / 2 && (from + to) / 2 <= state.to);
  return found.length ? found : steps.filter(({ from }) => from <= middle).slice(-1);
}
function zoom(factor, x = GUTTER + (width - GUTTER) / 2) {
  const at = timeOf(x);
  look(at - (at - state.from) * factor, at + (state.to - at) * factor);
}
function pan(share) { const by = (state.to - state.from) * share; look(state.from + by, state.to + by); }
function reveal(i, close = false) {
  const clock = CLOCKS[state.clock], start = clock.start[i], end = clock.end[i], span = state.to - state.from;
  if (close) {
    const room = Math.max((end - start) * 1.5, 10);
    look(start - room, end + room);
  } else if (end - start > span) look(start - span * 0.05, start + span * 0.95);
  else if (start < state.from || end > state.to) look((start + end) / 2 - span / 2, (start + end) / 2 + span / 2);
  const place = placeOfRow[row[i]], seen = height - RULER;
  if (place.y < view.scrollTop + HEAD) view.scrollTop = Math.max(0, place.y - HEAD);
  else if (place.y + LANE > view.scrollTop + seen) view.scrollTop = place.y + LANE - seen + 8;
}

function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    const before = performance.now();
    draw();
    frames.push(performance.now() - before);
    if (frames.length > 2000) frames.shift();
  });
}

function draw() {
  scrolled = view.scrollTop;
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.fillStyle = colours.back;
  pen.fillRect(0, 0, width, height);
  const visible = places.filter((place) => yOf(place) < height && yOf(place) + place.height > RULER);
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, RULER, width - GUTTER, height - RULER);
  pen.clip();
  pen.fillStyle = colours.lane;
  for (const place of visible) if (place.row !== undefined) pen.fillRect(GUTTER, yOf(place) + 2, width, LANE - 4);
  drawGrid();
  for (const place of visible) {
    if (place.rank === undefined) continue;
    pen.fillStyle = colours.back;
    pen.fillRect(GUTTER, yOf(place) - GAP / 2, width, place.height + GAP / 2);
    pen.fillStyle = colours.line;
    pen.fillRect(GUTTER, yOf(place) - GAP / 2, width, 1);
  }
  drawBars(visible.filter((place) => place.row !== undefined));
  for (const place of visible) {
    if (!place.track) continue;
    drawMemory(place);
    // Memory steps back where events are dimmed.
    pen.fillStyle = colours.back;
    pen.globalAlpha = state.path || state.matches ? 0.65 : 0;
    pen.fillRect(GUTTER, yOf(place), width, MEMORY);
    pen.globalAlpha = 1;
  }
  if (state.path) drawPath();
  for (const i of new Set([state.selected, state.hovered])) if (i >= 0) drawChosen(i);
  pen.restore();
  drawGutter(visible);
  drawRuler();
}

// Time marks: about one for each 110 pixels, at round times.
function marks() {
  const unit = CLOCKS[state.clock].unit, wanted = 110 / scale() * unit, power = 10 ** Math.floor(Math.log10(wanted));
  const gap = [1, 2, 5, 10].map((n) => n * power).find((one) => one >= wanted);
  const found = [];
  const last = Math.floor(state.to * unit / gap);
  for (let n = Math.ceil(state.from * unit / gap); n <= last; n++) found.push([n * gap / unit, n * gap]);
  return [found, gap];
}
function visibleSteps() {
  const steps = CLOCKS[state.clock].steps.filter(({ from }) => from >= state.from && from <= state.to);
  const every = 2 ** Math.max(0, Math.ceil(Math.log2(steps.length * 60 / (width - GUTTER))));
  return steps.filter((_, at) => at % every === 0);
}
function drawGrid() {
  pen.fillStyle = colours.line;
  for (const [time] of marks()[0]) pen.fillRect(Math.round(xOf(time)), RULER, 1, height);
  pen.fillStyle = colours.faint;
  for (const { from } of visibleSteps()) {
    for (let y = RULER; y < height; y += 6) pen.fillRect(Math.round(xOf(from)), y, 1, 3);
  }
}
function drawRuler() {
  pen.fillStyle = colours.panel;
  pen.fillRect(0, 0, width, RULER);
  pen.fillStyle = colours.line;
  pen.fillRect(0, RULER - 1, width, 1);
  // Which part of the run is seen.
  const { last } = CLOCKS[state.clock], all = (width - GUTTER) / last;
  pen.fillStyle = colours.accent;
  if (state.to - state.from < last) {
    pen.fillRect(GUTTER + state.from * all, RULER - 3, Math.max(4, (state.to - state.from) * all), 3);
  }
  pen.textBaseline = "middle";
  pen.font = colours.font;
  pen.fillStyle = colours.text;
  pen.textAlign = "left";
  pen.fillText(CLOCKS[state.clock].label, 12, RULER / 2);
  const [times, gap] = marks(), longest = Math.max(gap, ...times.map(([, s]) => Math.abs(s)));
  const power = Math.max(-12, Math.min(0, Math.floor(Math.log10(longest) / 3 + 1e-9) * 3));
  const digits = Math.max(0, Math.ceil(power - Math.log10(gap) - 1e-9));
  pen.textAlign = "center";
  for (const [time, s] of times) {
    const x = xOf(time);
    const text = `${(s / 10 ** power).toFixed(digits)} ${PREFIXES[power]}s`;
    if (x >= GUTTER && x < width - 20) pen.fillText(text, Math.max(x, GUTTER + widthOf(text) / 2), RULER - 9);
  }
  pen.font = colours.small;
  pen.fillStyle = colours.faint;
  pen.textAlign = "left";
  for (const { number, from } of visibleSteps()) {
    const text = `step ${number}`, x = xOf(from) + 2;
    if (x > GUTTER && x + widthOf(text) < width) pen.fillText(text, x, 8);
  }
}
function drawGutter(visible) {
  pen.fillStyle = colours.panel;
  pen.fillRect(0, RULER, GUTTER, height - RULER);
  pen.fillStyle = colours.line;
  pen.fillRect(GUTTER - 1, RULER, 1, height - RULER);
  pen.save();
  pen.beginPath();
  pen.rect(0, RULER, width, height - RULER);
  pen.clip();
  pen.textBaseline = "middle";
  for (const place of visible) {
    const y = yOf(place) + place.height / 2;
    if (place.rank !== undefined) {
      pen.fillStyle = colours.line;
      pen.fillRect(0, yOf(place) - GAP / 2, GUTTER, 1);
      pen.textAlign = "left";
      pen.fillStyle = colours.text;
      pen.font = colours.bold;
      pen.fillText(`rank ${place.rank}`, 12, y);
      drawShares(place.rank, y);
    } else {
      pen.textAlign = "right";
      pen.font = colours.font;
      pen.fillStyle = place.row === undefined ? colours.faint : colours.text;
      const text = place.track ? place.track.name : data.rows[place.row].name;
      pen.fillText(clipped(text, GUTTER - 24), GUTTER - 10, place.track ? y - 8 : y);
      if (!place.track) continue;
      pen.font = colours.small;
      pen.fillText(`peak ${bytes(place.track.peak)}`, GUTTER - 10, y + 8);
    }
  }
  pen.restore();
}
// How a rank spent its time by the shown clock: a bar, and a line of text.
function drawShares(rank, y) {
  const share = data.shares[state.clock].find((one) => one.rank === rank);
  if (!share) return;
  const fills = [colourOf("forward"), colourOf("collective"), colours.dim], whole = GUTTER - 86;
  let x = GUTTER - 10 - whole, under = GUTTER + 8;
  pen.textAlign = "left";
  pen.font = colours.small;
  Object.entries(share.parts).forEach(([name, part], at) => {
    const text = `${name} ${Math.round(part * 100)}%`;
    pen.fillStyle = fills[at];
    pen.fillRect(x, y - 5, whole * part, 10);
    pen.fillRect(under, y - 4, 8, 8);
    x += whole * part;
    pen.fillStyle = colours.faint;
    pen.fillText(text, under + 12, y);
    under += 24 + widthOf(text);
  });
}
const colourOf = (id) => data.kinds.find((kind) => kind.id === id).colour;

const widths = new Map();
function widthOf(text) {
  const key = pen.font + text;
  if (!widths.has(key)) widths.set(key, pen.measureText(text).width);
  return widths.get(key);
}
function clipped(text, room) {
  if (widthOf(text) <= room) return text;
  const kept = Math.floor(text.length * room / widthOf(text)) - 1;
  return kept > 1 ? `${text.slice(0, kept)}…` : "";
}
// The name of an event for a bar: with its layer where there is room, and cut off only as far as it stays distinct.
function label(i, room) {
  const text = data.names[name[i]], whole = layer[i] ? `${text} ${data.layers[layer[i]]}` : text;
  const fits = [whole, text].find((one) => widthOf(one) <= room);
  if (fits) return fits;
  for (const { text: form, needed } of forms.map((all) => all[name[i]])) {
    const cut = clipped(form, room);
    if (cut === form || cut.length > needed) return cut;
  }
  return "";
}

// Bars. An event of two pixels or more is a bar of its own. Thinner ones are gathered by columns of pixels, in which
// the height of a colour is its share of the time; a binary search steps from column to column, so the cost of a frame
// is that of the pixels, however many events there are. Rectangles are collected by colour.
const boxes = data.kinds.map(() => []).concat([[]]);
const hatches = [];
function drawBars(visible) {
  const labels = [], perPixel = scale(), rowsOfLanes = CLOCKS[state.clock].rows;
  for (const list of boxes) list.length = 0;
  hatches.length = 0;
  let lanes = 0;
  for (const place of visible) lanes += rowsOfLanes[place.row].length;
  const pixels = Math.min(4, Math.max(1, Math.ceil(lanes * (width - GUTTER) / 16000)));
  for (const place of visible) {
    const top = yOf(place) + 2, all = rowsOfLanes[place.row], h = (LANE - 4) / all.length;
    all.forEach((lane, at) => drawLane(lane, top + at * h, h, perPixel, pixels, labels));
  }
  for (const [k, list] of boxes.entries()) {
    fill(list, k === DIM ? colours.dim : data.kinds[k].colour);
  }
  fill(hatches, hatch);
  pen.fillStyle = colours.ink;
  pen.font = colours.font;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  for (const [i, x, y, room] of labels) {
    const fits = label(i, room);
    if (fits) pen.fillText(fits, x, y);
  }
}
function fill(list, style) {
  pen.fillStyle = style;
  for (let at = 0; at < list.length; at += 4) pen.fillRect(list[at], list[at + 1], list[at + 2], list[at + 3]);
}
function drawLane(lane, top, h, perPixel, pixels, labels) {
  const { starts, ends, events, kinds, sums } = lane, thin = 2 / perPixel, step = pixels / perPixel;
  const last = atLeast(starts, state.to), zero = GUTTER - state.from * perPixel;
  let i = after(ends, state.from), cut = -1, edge = -Infinity;  // cut: the event that reaches beyond the last column
  while (i < last) {
    const start = starts[i], end = ends[i];
    const isAlone = end - start >= thin || i + 1 >= last || starts[i + 1] - start >= step;
    if (cut >= 0 && (isAlone || start >= edge + step)) {
      boxes[shown[events[cut]]].push(zero + edge * perPixel, top, (ends[cut] - edge) * perPixel, h);
      cut = -1;
    }
    if (isAlone) {
      const left = Math.max(zero + start * perPixel, GUTTER - 4), k = shown[events[i]];
      const w = Math.max(Math.min(zero + end * perPixel, width + 4) - left, 1.5);
      // A thin line of background separates bars that have room for it.
      boxes[k].push(left, top, w > 5 ? w - 1 : w, h);
      if (w > 4 && k !== DIM && data.kinds[k].hatched) hatches.push(left, top, w - 1, h);
      if (w > 24 && h > 11 && k !== DIM) labels.push([events[i], left + 4, top + h / 2 + 0.5, w - 8]);
      i++;
      continue;
    }
    // A column begins at a fixed place of the picture, so that columns do not flicker while it moves.
    const before = cut < 0 ? 0 : ends[cut] - edge, kindBefore = cut < 0 ? -1 : shown[events[cut]];
    edge = (Math.floor(start / step) + 1) * step;
    const left = Math.round(zero + (edge - step) * perPixel);
    // The next column is near: look twice as far each time.
    let reach = 1;
    while (i + reach < last && starts[i + reach] < edge) reach *= 2;
    let next = atLeast(starts, edge, i + 1, Math.min(i + reach, last));
    // Events of a lane do not overlap, so only the last one can be long; it gets a bar of its own.
    if (next - 1 > i && ends[next - 1] - starts[next - 1] >= thin) next--;
    cut = ends[next - 1] > edge ? next - 1 : -1;
    const beyond = cut < 0 ? 0 : ends[cut] - edge, kindBeyond = cut < 0 ? -1 : shown[events[cut]];
    let y = top + h;
    for (let at = 0; at < kinds.length; at++) {
      const k = kinds[at], own = (k === kindBefore ? before : 0) - (k === kindBeyond ? beyond : 0);
      const part = Math.min((sums[at][next] - sums[at][i] + own) / step * h, y - top);
      if (part > 0.3) boxes[k].push(left, y -= part, pixels, part);
    }
    if (y === top + h) boxes[shown[events[i]]].push(left, y - 1, pixels, 1);
    i = next;
  }
  if (cut >= 0) boxes[shown[events[cut]]].push(zero + edge * perPixel, top, (ends[cut] - edge) * perPixel, h);
}

function drawMemory(place) {
  const { track } = place, clock = CLOCKS[state.clock], floor = yOf(place) + MEMORY - 6, tall = MEMORY - 14;
  const times = track[state.clock] ??= Float64Array.from(track.events, (i) => clock.end[i]);
  const first = Math.max(0, after(times, state.from) - 1), last = Math.min(times.length - 1, atLeast(times, state.to));
  // Of each column of pixels the fullest moment and the last one.
  const columns = [], perPixel = scale(), zero = GUTTER - state.from * perPixel;
  let column = -1e9;
  for (let i = first; i <= last; i++) {
    const x = Math.max(GUTTER - 1, Math.floor(zero + times[i] * perPixel));
    if (x > column) { columns.push(column = x, i, i); continue; }
    const at = columns.length - 2;
    columns[at + 1] = i;
    if (track.total[i] > track.total[columns[at]]) columns[at] = i;
  }
  // From the whole stack down to its lowest category; each covers the part of the one before that is not its own.
  for (let category = track.tops.length - 1; category >= 0; category--) {
    const tops = track.tops[category], yOfTop = (i) => floor - tops[i] / track.peak * tall;
    pen.fillStyle = data.memory.colours[category];
    pen.beginPath();
    let level = floor;
    const climb = (x, y) => { if (y !== level) { pen.lineTo(x, level); pen.lineTo(x, level = y); } };
    pen.moveTo(columns[0], floor);
    for (let at = 0; at < columns.length; at += 3) {
      const x = columns[at];
      climb(x, yOfTop(columns[at + 1]));
      if (columns[at + 3] !== x + 1) climb(x + 1, yOfTop(columns[at + 2]));
    }
    climb(columns[columns.length - 3] + 1, floor);
    pen.fill();
  }
}

// What belongs together: the members of a collective, the ends of a message.
function drawChosen(i) {
  const clock = CLOCKS[state.clock], linked = call[i] >= 0 ? members.get(call[i]) : [i];
  const others = linked.map((j) => ({ j, box: boxOf(j) })).sort((a, b) => a.box.y - b.box.y);
  pen.strokeStyle = colours.mark;
  pen.fillStyle = colours.mark;
  if (others.length > 1 && data.kinds[kind[i]].id !== "collective") {
    // An arrow from where the sending starts to where the message has arrived.
    const [from, to] = linked.map((j) => ({ j, box: boxOf(j) })).sort((a, b) => sent[b.j] - sent[a.j] || a.j - b.j);
    arrow(from.box.x, from.box.y + from.box.h / 2, to.box.x + to.box.w, to.box.y + to.box.h / 2);
  } else {
    for (let at = 1; at < others.length; at++) {
      const a = others[at - 1].box, b = others[at].box, low = a.y + a.h;
      pen.fillStyle = colours.band;
      pen.beginPath();
      pen.moveTo(a.x, low); pen.lineTo(a.x + a.w, low); pen.lineTo(b.x + b.w, b.y); pen.lineTo(b.x, b.y);
      pen.fill();
      pen.lineWidth = 1.5;
      arrow(a.x, low, b.x, b.y, 5, true);
      arrow(a.x + a.w, low, b.x + b.w, b.y, 5, true);
    }
  }
  for (const { j, box } of others) {
    pen.lineWidth = j === i ? 2.5 : 1.5;
    pen.strokeRect(box.x - 1, box.y - 1, Math.max(box.w, 2) + 1, box.h + 2);
  }
}
function arrow(x0, y0, x1, y1, tip = 7, both = false) {
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
  pen.fillStyle = colours.mark;
  const turned = Math.atan2(y1 - y0, x1 - x0);
  for (const [x, y, turn] of [[x1, y1, turned], [x0, y0, turned + Math.PI]].slice(0, both ? 2 : 1)) {
    pen.beginPath();
    pen.moveTo(x, y);
    for (const side of [-0.42, 0.42]) pen.lineTo(x - tip * Math.cos(turn + side), y - tip * Math.sin(turn + side));
    pen.fill();
  }
}

function drawPath() {
  const { start, end, lane, rows } = CLOCKS[state.clock], perPixel = scale(), zero = GUTTER - state.from * perPixel;
  pen.strokeStyle = colours.mark;
  pen.lineWidth = 2;
  pen.beginPath();
  let x0 = 0, y0 = NaN;  // where the event before ends
  for (const i of data.path) {
    const left = zero + start[i] * perPixel, right = zero + end[i] * perPixel, h = (LANE - 4) / rows[row[i]].length;
    const top = yOf(placeOfRow[row[i]]) + 2 + lane[i] * h, middle = top + h / 2;
    const isSeen = Math.max(left, x0) > GUTTER && Math.min(left, x0) < width;
    if (isSeen && middle !== y0 && y0 === y0) { pen.moveTo(x0, y0); pen.lineTo(left, middle); }
    if (right - left > 8 && left < width && right > GUTTER) pen.rect(left + 1, top + 1, right - left - 3, h - 2);
    x0 = right;
    y0 = middle;
  }
  pen.stroke();
}
