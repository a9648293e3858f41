"use strict";
// One page in three files: the model (events as columns), the picture (what is seen of it), the controls.
// Everything is drawn on one canvas, once for each frame in which something has changed.

const byId = (id) => document.getElementById(id);
const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
const data = JSON.parse(byId("data").textContent);
const canvas = byId("canvas"), pen = canvas.getContext("2d", { alpha: false }), view = byId("view");

// --- the model ------------------------------------------------------------------------------------------------------

const count = data.count;
// Numbers are a list, the different values with their places in it, or one value for all.
function unpacked(given, length, Kind) {
  if (Array.isArray(given)) return Kind.from(given);
  if (typeof given === "object") return Kind.from(given.at, (place) => given.of[place]);
  return new Kind(length).fill(given);
}
const column = (name, Kind) => unpacked(data.columns[name], count, Kind);
// Starts are differences to the event before.
function sums(name) {
  const values = column(name, Float64Array);
  for (let i = 1; i < count; i++) values[i] += values[i - 1];
  return values;
}
const row = column("row", Int32Array), kind = column("kind", Uint8Array), name = column("name", Int32Array);
const layer = column("layer", Int32Array), step = column("step", Int32Array), group = column("group", Int32Array);
const call = column("call", Int32Array), seq = column("seq", Int32Array), algorithm = column("algorithm", Int32Array);
const flops = column("flops", Float64Array), size = column("size_bytes", Float64Array);
const sent = column("sent_bytes", Float64Array);
const DIM = data.kinds.length;  // the colour of events that are not searched for

// Members of each communication, in the order of the rows.
const members = new Map();
for (let i = 0; i < count; i++) if (call[i] >= 0) members.get(call[i])?.push(i) ?? members.set(call[i], [i]);

// The clocks: starts and ends in ticks after the first start, and the lanes of each row: events that do not overlap.
const CLOCKS = { sim: { unit: 1e-12, label: "simulated time" }, wall: { unit: 1e-9, label: "wall time" } };
for (const [which, clock] of Object.entries(CLOCKS)) {
  clock.start = sums(which + "_start");
  const span = column(which + "_span", Float64Array);
  clock.end = clock.start.map((start, i) => start + span[i]);
  clock.last = Math.max(1, clock.end.reduce((a, b) => Math.max(a, b), 0));
}
const at = (values, places) => Float64Array.from(places, (place) => values[place]);
function lanesOf(clock) {
  const rows = data.rows.map(() => []);
  for (let i = 0; i < count; i++) rows[row[i]].push(i);
  clock.lane = new Int32Array(count);
  return rows.map((events) => {
    events.sort((a, b) => clock.start[a] - clock.start[b] || clock.end[a] - clock.end[b] || a - b);
    const lanes = [];
    for (const i of events) {
      let number = lanes.findIndex((one) => one.until <= clock.start[i]);
      if (number < 0) number = lanes.push({ events: [] }) - 1;
      lanes[number].events.push(i);
      lanes[number].until = clock.end[i];
      clock.lane[i] = number;
    }
    return lanes.map(({ events }) => ({ events, starts: at(clock.start, events), ends: at(clock.end, events) }));
  });
}
for (const clock of Object.values(CLOCKS)) {
  clock.rows = lanesOf(clock);
  // Each step, in order of time: its number, its first start and its last end on any rank.
  const steps = new Map();
  for (let i = 0; i < count; i++) {
    const [from, to] = steps.get(step[i]) ?? [Infinity, 0];
    steps.set(step[i], [Math.min(from, clock.start[i]), Math.max(to, clock.end[i])]);
  }
  clock.steps = [...steps].map(([number, [from, to]]) => ({ number, from, to })).sort((a, b) => a.from - b.from);
}

// Memory: for each track the samples in order of time.
for (const track of data.memory.tracks) {
  // tops[c][i]: categories up to c together; the last one is the total.
  track.live = track.live.map((values) => unpacked(values, track.events.length, Float64Array));
  track.tops = [];
  for (const live of track.live) track.tops.push(live.map((value, i) => value + (track.tops.at(-1)?.[i] ?? 0)));
  track.total = track.tops[track.tops.length - 1];
  track.peak = Math.max(1, track.total.reduce((a, b) => Math.max(a, b), 0));
}

// The class of an event is its kind, or DIM; prefix sums of time by class give the share of each in any interval.
const shown = new Uint8Array(count);
function classify() {
  for (let i = 0; i < count; i++) shown[i] = isBright(i) ? kind[i] : DIM;
  for (const lane of CLOCKS[state.clock].rows.flat()) {
    lane.kinds = [...new Set(lane.events.map((i) => shown[i]))].sort((a, b) => a - b);
    lane.sums = lane.kinds.map((k) => {
      const sums = new Float64Array(lane.events.length + 1);
      lane.events.forEach((i, at) => {
        sums[at + 1] = sums[at] + (shown[i] === k ? lane.ends[at] - lane.starts[at] : 0);
      });
      return sums;
    });
  }
}
function isBright(i) {
  if (state.matches) return state.isMatch[i] === 1;
  return !state.path || onPath[i] === 1;
}
const onPath = new Uint8Array(count);
for (const i of data.path) onPath[i] = 1;

// First place whose value is above `x`, or at least `x`.
function after(values, x, low = 0) {
  let high = values.length;
  while (low < high) { const mid = (low + high) >> 1; if (values[mid] <= x) low = mid + 1; else high = mid; }
  return low;
}
function atLeast(values, x, low = 0, high = values.length) {
  while (low < high) { const mid = (low + high) >> 1; if (values[mid] < x) low = mid + 1; else high = mid; }
  return low;
}

// Shorter forms of each name: without "backward", which the colour shows, and with letters for all words but the last:
// "a_reduce" for all_reduce. Of each form also how many letters distinguish it from those of the other names.
const FORMS = [(text) => text.split(".")[0], (text) => text.split(".")[0].replace(/([a-z])[a-z]*_/g, "$1_")];
const common = (a, b) => { let n = 0; while (n < a.length && a[n] === b[n]) n++; return n; };
const forms = FORMS.map((shorten) => {
  const texts = data.names.map(shorten), sorted = [...new Set(texts)].sort(), needed = new Map();
  sorted.forEach((text, i) => {
    needed.set(text, 1 + Math.max(common(text, sorted[i - 1] ?? ""), common(text, sorted[i + 1] ?? "")));
  });
  return texts.map((text) => ({ text, needed: needed.get(text) }));
});

// --- texts ----------------------------------------------------------------------------------------------------------

const PREFIXES = {
  "-12": "p", "-9": "n", "-6": "µ", "-3": "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E",
};
function si(value, unit, least = -12, most = 18) {
  if (value === 0) return `0 ${unit}`;
  const digits = Number(Math.abs(value).toExponential(2).split("e")[1]);
  const power = Math.min(Math.max(Math.floor(digits / 3) * 3, least), most);
  const scaled = value / 10 ** power;
  return `${Math.abs(scaled) < 999.5 ? Number(scaled.toPrecision(3)) : Math.round(scaled)} ${PREFIXES[power]}${unit}`;
}
const seconds = (ticks, clock) => si(ticks * clock.unit, "s", -12, 0);
const bytes = (n) => si(n, "B", 0);
function ranksText(ranks) {
  const whole = ranks.length > 2 && ranks.every((rank, i) => rank === ranks[0] + i);
  if (whole) return `${ranks[0]}–${ranks[ranks.length - 1]}`;
  return ranks.length > 12 ? `${ranks.slice(0, 10).join(", ")}, … (${ranks.length})` : ranks.join(", ");
}
function facts(i) {
  const { sim, wall } = CLOCKS, lane = data.rows[row[i]], of = data.groups[group[i]];
  const found = [["rank", `${lane.rank}, ${lane.name}`]];
  if (layer[i]) found.push(["layer", data.layers[layer[i]]]);
  found.push(["kind", `${data.kinds[kind[i]].name}, step ${step[i]}`]);
  for (const [label, clock] of [["simulated", sim], ["wall", wall]]) {
    found.push([label, `${seconds(clock.end[i] - clock.start[i], clock)}, from ${seconds(clock.start[i], clock)}`]);
  }
  if (of.length && data.kinds[kind[i]].name === "message") found.push(["message", `rank ${of[0]} to rank ${of[1]}`]);
  else if (of.length) {
    found.push(["group", `ranks ${ranksText(of)}`]);
    const partners = of.filter((rank) => rank !== lane.rank);
    if (partners.length) found.push(["partners", `ranks ${ranksText(partners)}`]);
  }
  if (seq[i] >= 0) found.push(["number", `${seq[i]}${algorithm[i] ? `, ${data.algorithms[algorithm[i]]}` : ""}`]);
  if (size[i]) found.push([of.length ? "size" : "memory moved", bytes(size[i])]);
  if (sent[i]) found.push(["sent", bytes(sent[i])]);
  if (flops[i]) found.push(["work", si(flops[i], "flop", 0)]);
  return found;
}
const sentence = (i) => [data.names[name[i]], ...facts(i).map(([what, text]) => `${what} ${text}`)].join("; ");
