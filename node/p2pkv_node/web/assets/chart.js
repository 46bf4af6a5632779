// Small drawings of the polled figures. Text goes in by textContent, shapes as SVG elements: nothing is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 80;
const KEYS = ["first", "second"];

function shape(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

function drawing(parent, label, height) {
  const box = { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  return shape("svg", box, parent);
}

// A line chart of what was polled lately.
export class Chart {
  // `series` maps names to a function that gives the value of a sample, or null where it has none; `format` shows a value.
  constructor(parent, title, series, format, { most = 0 } = {}) {
    this.series = Object.entries(series);
    this.format = format;
    this.most = most;
    this.samples = [];
    const card = document.createElement("div");
    card.className = "chart";
    this.title = title;
    this.heading = document.createElement("h3");
    this.heading.textContent = title;
    const legend = document.createElement("p");
    legend.className = "legend";
    this.labels = this.series.map(([name], i) => {
      const label = document.createElement("span");
      label.className = KEYS[i];
      label.textContent = name;
      legend.append(label);
      return label;
    });
    card.append(this.heading, legend);
    this.svg = drawing(card, title, HEIGHT);
    this.zero = shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }, this.svg);
    this.lines = this.series.map((_, i) => shape("polyline", { class: KEYS[i], points: "" }, this.svg));
    this.cursor = shape("line", { class: "cursor", x1: 0, x2: 0, y1: 0, y2: HEIGHT, visibility: "hidden" }, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    parent.append(card);
  }

  show(samples, room) {
    this.samples = samples;
    this.room = room;
    const values = this.series.map(([, value]) => samples.map(value));
    const known = values.flat().filter((value) => value !== null);
    const bottom = Math.min(0, ...known);
    const top = Math.max(this.most, ...known) || (bottom < 0 ? 0 : 1);
    const y = (value) => (HEIGHT - 2 - ((value - bottom) / (top - bottom)) * (HEIGHT - 6)).toFixed(1);
    this.heading.textContent = `${this.title}, ${bottom < 0 ? `from ${this.format(bottom)} ` : ""}up to ${this.format(top)}`;
    for (const end of ["y1", "y2"]) this.zero.setAttribute(end, y(0));
    this.lines.forEach((line, i) => {
      const points = [];
      values[i].forEach((value, at) => {
        if (value !== null) points.push(`${this.x(at).toFixed(1)},${y(value)}`);
      });
      line.setAttribute("points", points.join(" "));
    });
    if (this.cursor.getAttribute("visibility") === "hidden") this.label(samples.length - 1);
  }

  // The newest sample is at the right edge; `room` samples fill the width.
  x(at) {
    return WIDTH - ((this.samples.length - 1 - at) * WIDTH) / (this.room - 1);
  }

  label(at) {
    const sample = this.samples[at];
    this.series.forEach(([name, value], i) => {
      const shown = sample === undefined ? null : value(sample);
      this.labels[i].textContent = `${name} ${shown === null ? "–" : this.format(shown)}`;
    });
  }

  point(event) {
    if (!this.samples.length) return;
    const box = this.svg.getBoundingClientRect();
    const back = Math.round(((box.right - event.clientX) / box.width) * (this.room - 1));
    const at = Math.max(0, Math.min(this.samples.length - 1, this.samples.length - 1 - back));
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(at));
    this.cursor.setAttribute("visibility", "visible");
    this.label(at);
  }

  leave() {
    this.cursor.setAttribute("visibility", "hidden");
    this.label(this.samples.length - 1);
  }
}

// A bar with two marks: how full something is, and where it begins and stops being emptied.
export class Bar {
  constructor(parent, label) {
    this.svg = drawing(parent, label, 10);
    shape("rect", { class: "track", x: 0, y: 0, width: WIDTH, height: 10 }, this.svg);
    this.full = shape("rect", { class: "full", x: 0, y: 0, width: 0, height: 10 }, this.svg);
    this.marks = ["low", "high"].map((name) => shape("line", { class: name, y1: 0, y2: 10 }, this.svg));
  }

  show(value, low, high) {
    const top = 1.04 * Math.max(value, high) || 1; // so that the high mark does not lie on the edge
    const x = (at) => ((at / top) * WIDTH).toFixed(1);
    this.full.setAttribute("width", x(value));
    this.full.setAttribute("class", value > high ? "full over" : "full");
    [low, high].forEach((mark, i) => {
      for (const end of ["x1", "x2"]) this.marks[i].setAttribute(end, x(mark));
    });
  }
}
