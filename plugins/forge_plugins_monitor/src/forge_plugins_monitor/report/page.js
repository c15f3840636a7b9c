"use strict";
// Draws each figure from the numbers in it. Runs and their events stand once in the page, in the element "runs".
(() => {
  const RUNS = JSON.parse(document.getElementById("runs").textContent);
  const HEIGHT = 250, TOP = 10, BOTTOM = 40, RIGHT = 12;
  const MARKS = { saved: "▴", resumed: "↻", skipped: "✕", rolled_back: "↶" };
  const shown = RUNS.map(() => true);
  const color = (run) => `var(--c${run % 10})`;
  const dashes = (run) => ["", "7 3", "2 3"][Math.floor(run / 10) % 3];

  function make(name, attributes, parent, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }
  function element(name, className, parent, text) {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  // 1234567 is 1.23M at an axis; a value under the pointer has all the digits that the page has
  function short(value) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size < 1e-3 || size >= 1e15) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit) return `${parseFloat((value / unit).toPrecision(4))}${letter}`;
    return String(parseFloat(value.toPrecision(5)));
  }
  const exact = (value) => {
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(4);
    return value.toLocaleString("en", { maximumSignificantDigits: Math.max(6, Math.trunc(size).toString().length) });
  };

  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || 10 * power;
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
    return found;
  }
  function logTicks(low, high) {
    let found = [];
    for (const within of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]]) {
      found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
        for (const m of within) if (m * 10 ** power >= low && m * 10 ** power <= high) found.push(m * 10 ** power);
      if (found.length >= 3) break;
    }
    const every = Math.ceil(found.length / 7);
    return found.length >= 2 ? found.filter((_, i) => i % every === 0) : ticks(low, high, 4);
  }

  function extent(curves, pick) {
    let low = Infinity, high = -Infinity;
    for (const curve of curves)
      for (const value of pick(curve)) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
    return [low, high];
  }
  function nearest(steps, x) {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] < x) low = middle; else high = middle; }
    return Math.abs(steps[low] - x) <= Math.abs(steps[high] - x) ? low : high;
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.log = false;
      this.svg = make("svg", { role: "img", tabindex: 0, "aria-label": this.words() });
      figure.insertBefore(this.svg, figure.querySelector("script"));
      this.tip = element("div", "tip", figure);
      this.tip.hidden = true;
      if (extent(this.data.curves, (c) => c.y)[0] > 0) {
        const toggle = element("button", "scale", figure, "log");
        toggle.type = "button";
        toggle.title = "logarithmic axis";
        toggle.setAttribute("aria-pressed", "false");
        toggle.addEventListener("click", () => {
          this.log = !this.log;
          toggle.setAttribute("aria-pressed", String(this.log));
          this.draw();
        });
      }
      const point = (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left);
      this.svg.addEventListener("pointermove", point);
      this.svg.addEventListener("pointerdown", point);
      this.svg.addEventListener("pointerleave", () => this.leave());
      this.svg.addEventListener("blur", () => this.leave());
      this.svg.addEventListener("keydown", (event) => this.key(event));
    }

    words() {
      const last = this.data.curves.map((c) => {
        const y = c.y[c.y.length - 1];
        return `${RUNS[c.run].label} ends at ${y === null ? "no finite value" : exact(y)}`;
      });
      return `${this.data.title} over steps. ${last.join(", ")}`;
    }

    draw() {
      const width = this.figure.clientWidth - 20;
      if (width < 50) return; // folded away; drawn when it is opened
      this.leave();
      const svg = this.svg;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      svg.setAttribute("height", HEIGHT);
      this.curves = this.data.curves.filter((c) => shown[c.run]);
      let [low, high] = extent(this.curves, (c) => c.y), [first, last] = extent(this.curves, (c) => c.x);
      if (low > high) {
        const why = this.curves.length ? "no finite value" : "all runs are hidden";
        make("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, svg, why);
        this.x = null;
        return;
      }
      if (first === last) { first -= 1; last += 1; }
      if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
      const log = this.log && low > 0;
      const scale = log ? Math.log10 : (v) => v;
      const pad = (scale(high) - scale(low)) * 0.04;
      const bottom = scale(low) - pad, top = scale(high) + pad, floor = HEIGHT - BOTTOM;
      const marksY = log ? logTicks(low, high) : ticks(bottom, top, 5);
      const longest = Math.max(...marksY.map((v) => short(v).length));
      const left = 14 + 7.2 * longest + (this.data.unit ? 16 : 0);
      this.left = left;
      this.right = width - RIGHT;
      this.x = (step) => left + ((step - first) / (last - first)) * (this.right - left);
      this.step = (pixel) => first + ((pixel - left) / (this.right - left)) * (last - first);
      this.y = (v) => floor - ((scale(v) - bottom) / (top - bottom)) * (floor - TOP);
      for (const v of marksY) {
        make("line", { class: "grid", x1: left, x2: this.right, y1: this.y(v), y2: this.y(v) }, svg);
        make("text", { x: left - 6, y: this.y(v) + 4, "text-anchor": "end" }, svg, short(v));
      }
      for (const v of ticks(first, last, Math.max(2, Math.min(8, width / 90))).filter(Number.isInteger)) {
        make("line", { class: "axis", x1: this.x(v), x2: this.x(v), y1: floor, y2: floor + 4 }, svg);
        make("text", { x: this.x(v), y: floor + 17, "text-anchor": "middle" }, svg, short(v));
      }
      make("line", { class: "axis", x1: left, x2: this.right, y1: floor, y2: floor }, svg);
      make("text", { x: (left + this.right) / 2, y: HEIGHT - 7, "text-anchor": "middle" }, svg, "step");
      if (this.data.unit) {
        const middle = (TOP + floor) / 2;
        make("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, svg, this.data.unit);
      }
      if (this.data.events) this.events(first, last, floor);
      for (const curve of this.curves) this.curve(curve);
      for (const curve of this.curves) if (curve.meanX) this.path(curve.run, curve.meanX, curve.meanY, 1);
      this.cursor = make("g", {}, svg);
    }

    curve(curve) {
      const isNoisy = Boolean(curve.meanX);
      this.path(curve.run, curve.x, curve.y, isNoisy ? 0.3 : 1);
      if (curve.x.length <= 40)
        curve.y.forEach((y, i) => {
          if (y !== null) make("circle", { cx: this.x(curve.x[i]), cy: this.y(y), r: 2.5, fill: color(curve.run) }, this.svg);
        });
    }

    path(run, steps, values, opacity) {
      let path = "", pen = "M";
      values.forEach((y, i) => {
        if (y === null) { pen = "M"; return; }
        path += `${pen}${this.x(steps[i]).toFixed(1)} ${this.y(y).toFixed(1)}`;
        pen = "L";
      });
      const paint = { stroke: color(run), "stroke-dasharray": dashes(run), opacity };
      make("path", { class: "curve", d: path, ...paint }, this.svg);
    }

    events(first, last, floor) {
      for (const { run } of this.curves)
        for (const [step, kind] of RUNS[run].events) {
          if (step < first || step > last) continue;
          const x = this.x(step);
          if (kind !== "saved")
            make("line", { x1: x, x2: x, y1: TOP + 8, y2: floor, stroke: color(run), "stroke-dasharray": "3 4", opacity: 0.7 }, this.svg);
          const at = { x, y: kind === "saved" ? floor - 1 : TOP + 5, "text-anchor": "middle", style: `fill:${color(run)}` };
          make("text", at, this.svg, MARKS[kind]);
        }
    }

    point(pixel) {
      if (!this.x) return;
      const step = this.step(Math.max(this.left, Math.min(this.right, pixel)));
      // the nearest step at which some curve has a point
      const candidates = this.curves.map((c) => c.x[nearest(c.x, step)]);
      this.show(candidates.reduce((a, b) => (Math.abs(a - step) <= Math.abs(b - step) ? a : b)));
    }

    show(step) {
      this.at = step;
      const near = Math.abs(this.step(this.left + 6) - this.step(this.left));
      this.cursor.replaceChildren();
      make("line", { class: "cursor", x1: this.x(step), x2: this.x(step), y1: TOP, y2: HEIGHT - BOTTOM }, this.cursor);
      this.tip.replaceChildren();
      element("div", "", this.tip, `step ${step.toLocaleString("en")}`);
      for (const curve of this.curves) {
        const i = nearest(curve.x, step);
        if (Math.abs(curve.x[i] - step) > near) continue; // this run has nothing here
        const row = element("div", "", this.tip);
        element("span", "swatch", row).style.background = color(curve.run);
        const elsewhere = curve.x[i] === step ? "" : ` (${curve.x[i].toLocaleString("en")})`;
        element("span", "", row, RUNS[curve.run].label + elsewhere);
        element("b", "", row, curve.y[i] === null ? "not finite" : exact(curve.y[i]));
        if (curve.y[i] !== null)
          make("circle", { cx: this.x(curve.x[i]), cy: this.y(curve.y[i]), r: 3.5, fill: color(curve.run) }, this.cursor);
      }
      if (this.data.events) this.say(step, near);
      this.tip.hidden = false;
      const room = this.figure.clientWidth - this.tip.offsetWidth - 6, x = this.x(step) + 22;
      this.tip.style.left = `${x <= room ? x : Math.max(6, this.x(step) - this.tip.offsetWidth - 2)}px`;
      const above = this.svg.getBoundingClientRect().top - this.figure.getBoundingClientRect().top;
      this.tip.style.top = `${above + TOP}px`;
    }

    say(step, near) {
      for (const { run } of this.curves)
        for (const [at, kind, words] of RUNS[run].events)
          if (Math.abs(at - step) <= near) {
            const row = element("div", "", this.tip);
            element("span", "", row, `${MARKS[kind]} `).style.color = color(run);
            element("span", "", row, `${RUNS[run].label}: ${words}`);
          }
    }

    key(event) {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!way || !this.x) return;
      event.preventDefault();
      const steps = [...new Set(this.curves.flatMap((c) => c.x))].sort((a, b) => a - b);
      const i = this.at === undefined ? (way > 0 ? 0 : steps.length - 1) : nearest(steps, this.at) + way;
      this.show(steps[Math.max(0, Math.min(steps.length - 1, i))]);
    }

    leave() {
      this.tip.hidden = true;
      this.at = undefined;
      if (this.cursor) this.cursor.replaceChildren();
    }
  }

  for (const swatch of document.querySelectorAll(".swatch[data-run]")) swatch.style.background = color(Number(swatch.dataset.run));
  const charts = new Map([...document.querySelectorAll("figure.chart")].map((figure) => [figure, new Chart(figure)]));
  for (const box of document.querySelectorAll("#legend input"))
    box.addEventListener("change", () => {
      shown[Number(box.value)] = box.checked;
      for (const chart of charts.values()) chart.draw();
    });
  const widths = new Map();
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (widths.get(target) === target.clientWidth) continue; // its own drawing has changed its height
      widths.set(target, target.clientWidth);
      charts.get(target).draw();
    }
  });
  for (const figure of charts.keys()) observer.observe(figure);
})();
