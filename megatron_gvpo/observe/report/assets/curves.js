// The curves: charts of metrics over the steps, all runs in one chart.

const charts = new Map(); // figure -> its uPlot, made when the figure comes into view
const sync = uPlot.sync("steps");
const PHASES = ["rollout", "reward", "scoring", "training", "sync"];
const MEMORY = ["weights", "gradients", "optimizer", "activations", "head"];

const inView = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting && !charts.has(entry.target)) entry.target.draw();
}, { rootMargin: "300px" });

function showCurves(root) {
  dropCharts();
  const { questions, sections, section_of: sectionOf } = state.index;
  const logged = new Set(state.index.runs.flatMap(run => Object.keys(run.metrics)));
  const shown = new Set();
  const parts = [glance()];
  parts.push(alertList());
  parts.push(...runsShown().map(([run, i]) => mismatchTable(run, i)));
  for (const [title, wanted] of Object.entries(questions)) {
    const names = wanted.flatMap(name => matching(name, logged)).filter(name => !shown.has(name));
    names.forEach(name => shown.add(name));
    const figures = names.map(chart);
    if (names.includes("time/step")) figures.push(...phaseCharts());
    if (figures.length) parts.push(h("h2", {}, title), h("div", { class: "grid" }, figures));
  }
  parts.push(memoryTables());
  const rest = [...logged].filter(name => !shown.has(name));
  if (rest.length) parts.push(h("h2", {}, "All other metrics"));
  for (const title of [...Object.keys(sections), "Other metrics"]) {
    const names = rest.filter(name => sectionOf[name] === title);
    if (names.length) parts.push(folded(title.replaceAll("`", ""), names));
  }
  root.replaceChildren(...parts.filter(Boolean));
}

function matching(name, logged) {
  if (!name.endsWith("*")) return logged.has(name) ? [name] : [];
  const found = [...logged].filter(other => other.startsWith(name.slice(0, -1)));
  return found.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

function folded(title, names) {
  const grid = h("div", { class: "grid" });
  const fill = () => grid.childElementCount || grid.append(...names.map(chart));
  const count = h("span", { class: "count" }, `${names.length}`);
  return h("details", { class: "more", ontoggle: fill }, h("summary", {}, title, " ", count), grid);
}

// --- the table at the top ---

function glance() {
  const heads = ["run", "steps", "reward", "pass@1, held out", "response length", "time of a step", "tokens/s", "in all"];
  const rows = state.index.runs.map((run, i) => {
    const at = name => (run.metrics[name] ?? []).filter(value => value != null);
    const total = run.config["train.steps"];
    const last = run.step.at(-1) ?? 0;
    const seconds = at("time/step");
    return h("tr", {},
      h("th", { scope: "row" }, swatch(i), run.name),
      cell(heads[1], total ? `${last} of ${total}` : `${last}`),
      cell(heads[2], fromTo(at("reward/mean"), "reward")),
      cell(heads[3], fromTo(at("eval/pass@1"), "share", true), interval(run)),
      cell(heads[4], fromTo(at("response/length"), "tokens"), " tokens"),
      cell(heads[5], seconds.length ? `${show(mean(seconds))} s` : "–"),
      cell(heads[6], show(at("throughput/tokens_per_s").at(-1))),
      cell(heads[7], seconds.length ? duration(seconds.reduce((a, b) => a + b, 0)) : "–"));
  });
  return h("div", { class: "wide" }, h("table", { class: "glance" },
    h("thead", {}, h("tr", {}, heads.map(head => h("th", { scope: "col" }, head)))), h("tbody", {}, rows)));
}

// The alerts of the runs that are shown, newest first; the first few at once.
function alertList() {
  const several = state.index.runs.length > 1;
  const all = runsShown().flatMap(([run, i]) => run.alerts.map(alert => ({ ...alert, i, run: run.name })));
  if (!all.length) return null;
  all.sort((a, b) => b.step - a.step);
  const items = all.map(({ step, rule, message, advice, i, run }) => h("li", {},
    h("span", { class: "at" }, `step ${step}`), h("div", {}, h("b", {}, rule), several ? [" ", swatch(i), run] : null,
      h("p", {}, `${message[0].toUpperCase()}${message.slice(1)}.`), h("p", { class: "look" }, `Look at ${advice}.`))));
  const rest = items.splice(4);
  const more = rest.length > 0 && h("details", { class: "more" }, h("summary", {}, `${rest.length} earlier`), h("ol", {}, rest));
  return h("section", { class: "alerts", "aria-label": "Alerts" }, h("h2", {}, all.length === 1 ? "One alert" : `${all.length} alerts`), h("ol", {}, items), more);
}

// What `megatron-gvpo mismatch` has found in a run: the causes of the gap between engine and trainer.
function mismatchTable(run, i) {
  const found = run.mismatch;
  if (!found) return null;
  const heads = ["side", "cause", "share", "mean, nats", "largest, nats", "bound, nats", "detail"];
  const rows = found.causes.map(cause => h("tr", {}, cell(heads[0], cause.side), cell(heads[1], cause.name),
    cell(heads[2], `${(100 * cause.share).toFixed(1)} %`), cell(heads[3], show(cause.mean)), cell(heads[4], show(cause.largest)),
    cell(heads[5], cause.bound === null ? "–" : show(cause.bound)), cell(heads[6], cause.detail)));
  const worst = found.worst.map(token => h("li", {}, `response ${token.response}, token ${token.token} “${token.text}”: engine ` +
    `${show(token.engine)}, trainer ${show(token.trainer)}, judge ${show(token.judge)} (${token.cause})`));
  return h("section", { class: "mismatch", "aria-label": "Mismatch" },
    h("h2", {}, state.index.runs.length > 1 ? [swatch(i), " ", run.name, ": "] : null, `Mismatch of engine and trainer in step ${found.step}`),
    h("div", { class: "wide" }, h("table", { class: "glance" },
      h("thead", {}, h("tr", {}, heads.map(head => h("th", { scope: "col" }, head)))), h("tbody", {}, rows))),
    h("details", { class: "more" }, h("summary", {}, "The worst tokens"), h("ol", {}, worst)));
}

const cell = (head, ...content) => h("td", { "data-head": head }, h("span", {}, ...content));

// Means of the first and the last tenth of the steps; of evaluations, the first and the last.
function fromTo(values, unit, single = false) {
  if (!values.length) return "–";
  const part = single ? 1 : Math.max(1, Math.floor(values.length / 10));
  const [first, last] = [mean(values.slice(0, part)), mean(values.slice(-part))];
  return h("span", {}, h("span", { class: "from" }, `${show(first, unit)} → `), h("b", {}, show(last, unit)));
}

function interval(run) {
  const at = Object.entries(run.intervals["eval/pass@1"] ?? {}).at(-1);
  if (!at) return null;
  const [low, high] = at[1];
  return h("span", { class: "from", title: "95 % confidence interval over the prompts" },
    ` ${(100 * low).toFixed(0)}–${(100 * high).toFixed(0)} %`);
}

function swatch(i) {
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("class", `swatch run-${i % 6}`);
  line.setAttribute("viewBox", "0 0 22 10");
  line.setAttribute("aria-hidden", "true");
  const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ x1: 0, x2: 22, y1: 5, y2: 5, "stroke-dasharray": DASHES[i % 6].join(" ") }))
    stroke.setAttribute(name, value);
  line.append(stroke);
  return line;
}

// --- charts ---

function chart(name) {
  const [unit, meaning] = words(name);
  const values = h("div", { class: "values" });
  const place = h("div", { class: "plot" });
  const figure = h("figure", { class: "chart", tabindex: 0, "aria-label": `${name}. ${meaning}`, onkeydown: moveCursor },
    h("figcaption", {}, h("div", { class: "name" }, h("b", {}, name)), values),
    place, h("p", { class: "meaning" }, h("span", { class: "unit" }, unit === "share" ? "%" : unit), " ", meaning));
  figure.draw = () => draw(figure, place, values, name, unit);
  inView.observe(figure);
  return figure;
}

function draw(figure, place, values, name, unit) {
  const runs = runsShown().filter(([run]) => run.metrics[name]);
  const steps = [...new Set(runs.flatMap(([run]) => run.step.filter((_, i) => run.metrics[name][i] != null)))];
  steps.sort((a, b) => a - b);
  const place_of = new Map(steps.map((step, i) => [step, i]));
  const data = [steps], series = [{}], bands = [], exact = [];
  const held = name.startsWith("eval/");
  for (const [run, i] of runs) {
    const column = new Array(steps.length).fill(null);
    run.step.forEach((step, at) => { if (run.metrics[name][at] != null) column[place_of.get(step)] = run.metrics[name][at]; });
    exact.push([i, column]);
    const known = column.filter(value => value != null).length;
    const smooth = state.smooth && !held && known > 20;
    const line = { stroke: colour(i), dash: DASHES[i % 6], width: 2, spanGaps: true, points: { show: known < 30, size: 5, fill: colour(i) } };
    if (smooth) {
      data.push(column, smoothed(column, Math.max(1, known / 40)));
      series.push({ stroke: colour(i), width: 1, alpha: 0.28, spanGaps: true, points: { show: false } }, { ...line, points: { show: false } });
    } else {
      data.push(column);
      series.push(line);
    }
    if (run.intervals[name] && Object.keys(run.intervals[name]).length) {
      const [low, high] = [0, 1].map(end => steps.map(step => run.intervals[name][step]?.[end] ?? null));
      data.push(high, low);
      const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      series.push(edge, edge);
      bands.push({ series: [data.length - 2, data.length - 1], fill: colour(i) + "2e" });
    }
  }
  const write = at => values.replaceChildren(...exact.map(([i, column]) => {
    const value = at == null ? column.findLast(v => v != null) : column[at];
    return h("span", { class: `value run-${i % 6}` }, exact.length > 1 ? swatch(i) : null, show(value, unit));
  }), at == null ? "" : h("span", { class: "at" }, `step ${steps[at]}`));
  plot(figure, place, data, { series, bands, unit, write });
}

function plot(figure, place, data, { series, bands = [], unit, write, zero = false }) {
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const short = data[0].length === 1;
  const made = new uPlot({
    width: place.clientWidth || 320, height: 168, padding: [8, 16, 0, 0],
    cursor: { sync: { key: sync.key }, points: { size: 6 }, drag: { x: true, y: false } },
    legend: { show: false },
    scales: { x: { time: false, range: short ? (_, low) => [low - 1, low + 1] : undefined },
              y: { range: (_, low, high) => room(low, high, unit, zero) } },
    axes: [{ ...axis, size: 26, gap: 3, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
           { ...axis, size: 46, gap: 4, space: 30, values: (_, marks) => marks.map(mark => show(mark, unit)) }],
    series, bands,
    hooks: { setCursor: [u => write(u.cursor.idx ?? null)] },
  }, data, place);
  charts.get(figure)?.destroy();
  charts.set(figure, made);
  write(null);
}

// The range of an axis: the data with some room, and a line in the middle for a value that never changes.
function room(low, high, unit, zero) {
  if (low == null) return [0, 1];
  if (zero) return [0, high * 1.05 || 1];
  const same = high - low <= 1e-9 * Math.abs(high);
  const spread = same ? Math.abs(high) * 0.2 || 1 : high - low;
  const [from, to] = [low - 0.08 * spread, high + 0.08 * spread];
  const bounded = low >= 0 && from < 0 ? 0 : from;
  return [bounded, unit === "share" && high <= 1 ? Math.min(to, 1) || to : to];
}

// A Gaussian average over known values; `width` is its standard deviation in points.
function smoothed(column, width) {
  const known = column.flatMap((value, i) => value == null ? [] : [[i, value]]);
  const reach = Math.ceil(3 * width);
  const result = new Array(column.length).fill(null);
  known.forEach(([at], i) => {
    let sum = 0, weights = 0;
    for (let j = Math.max(0, i - reach); j <= Math.min(known.length - 1, i + reach); j++) {
      const weight = Math.exp(-0.5 * ((j - i) / width) ** 2);
      sum += weight * known[j][1];
      weights += weight;
    }
    result[at] = sum / weights;
  });
  return result;
}

function moveCursor(event) {
  const made = charts.get(event.currentTarget);
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!made || !by) return;
  event.preventDefault();
  const at = Math.max(0, Math.min(made.data[0].length - 1, (made.cursor.idx ?? (by > 0 ? -1 : made.data[0].length)) + by));
  made.setCursor({ left: made.valToPos(made.data[0][at], "x"), top: made.over.clientHeight / 2 });
}

// --- phases of a step, and memory ---

function phaseCharts() {
  return runsShown().filter(([run]) => run.metrics["time/step"]).map(([run, i]) => {
    const rows = run.step.map((_, at) => at).filter(at => run.metrics["time/step"][at] != null);
    const of = phase => rows.map(at => run.metrics[`time/${phase}`]?.[at] ?? 0);
    const parts = PHASES.map(phase => [phase, of(phase)]).filter(([, column]) => column.some(value => value > 0));
    const whole = of("step");
    parts.push(["other", whole.map((value, at) => Math.max(0, value - parts.reduce((sum, [, c]) => sum + c[at], 0)))]);
    const values = h("div", { class: "values" });
    const place = h("div", { class: "plot" });
    const title = state.index.runs.length > 1 ? [swatch(i), run.name] : [];
    const figure = h("figure", { class: "chart", tabindex: 0, "aria-label": `phases of a step, ${run.name}`, onkeydown: moveCursor },
      h("figcaption", {}, h("div", { class: "name" }, h("b", {}, "phases of a step"), " ", ...title)),
      place, values);
    figure.draw = () => {
      const sums = [];
      parts.forEach(([, column], j) => sums.push(column.map((value, at) => value + (j ? sums[j - 1][at] : 0))));
      const order = parts.map((_, j) => j).reverse(); // the highest sum is drawn first, the others on it
      const series = [{}, ...order.map(j => ({ fill: css(`--phase-${phaseNumber(parts[j][0])}`), stroke: css("--paper"), width: 0.5, points: { show: false } }))];
      const write = at => values.replaceChildren(...parts.map(([phase, column]) => {
        const value = at == null ? mean(column) : column[at];
        return h("span", { class: "value" }, h("i", { class: `dot phase-${phaseNumber(phase)}` }), `${phase} ${show(value)}`);
      }), h("span", { class: "at" }, at == null ? "mean, s" : `step ${run.step[rows[at]]}, s`));
      plot(figure, place, [rows.map(at => run.step[at]), ...order.map(j => sums[j])], { series, unit: "s", write, zero: true });
    };
    inView.observe(figure);
    return figure;
  });
}

const phaseNumber = phase => phase === "other" ? PHASES.length : PHASES.indexOf(phase);

function memoryTables() {
  const tables = runsShown().map(([run, i]) => {
    const first = name => (run.metrics[`memory/${name}_gib`] ?? []).find(value => value != null);
    const peak = first("peak");
    if (peak == null) return null;
    const bars = [...MEMORY, "peak"].filter(name => first(name) != null).map(name => {
      const fill = h("i", { class: `fill ${name === "peak" ? "peak" : ""}` });
      fill.style.width = `${Math.min(100, 100 * first(name) / peak)}%`;
      return h("tr", { title: words(`memory/${name}_gib`)[1] }, h("th", { scope: "row" }, name),
        h("td", { class: "barcell" }, fill), h("td", { class: "number" }, gib(first(name))));
    });
    return h("figure", { class: "chart" },
      h("figcaption", {}, h("div", { class: "name" }, state.index.runs.length > 1 ? [swatch(i), run.name] : h("b", {}, "memory of the first update"))),
      h("table", { class: "bars" }, h("tbody", {}, bars)),
      h("p", { class: "meaning" }, "On the rank with the highest peak. The parts need not add up: they peak at different times."));
  }).filter(Boolean);
  return tables.length ? h("div", {}, h("h2", {}, "What fills the memory?"), h("div", { class: "grid" }, tables)) : null;
}

const gib = value => value < 1 ? `${show(1024 * value)} MiB` : `${show(value)} GiB`;

function dropCharts() {
  for (const made of charts.values()) made.destroy();
  charts.clear();
}

new ResizeObserver(() => {
  for (const [figure, made] of charts) {
    const width = figure.querySelector(".plot").clientWidth;
    if (width && width !== made.width) made.setSize({ width, height: made.height });
  }
}).observe(document.body);
