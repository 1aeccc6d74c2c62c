// The sample browser: groups of responses by step, or single responses, sorted, searched and shown.

const SORTS = {
  "as sampled": { key: () => 0, by: "reward" },
  "best reward first": { key: item => -item.reward, by: "reward" },
  "worst reward first": { key: item => item.reward, by: "reward" },
  "rewards most different": { key: item => -(item.spread ?? 0), by: "reward" },
  "most surprise first": { key: item => -(item.surprise ?? -1), by: "surprise" },
  "least surprise first": { key: item => item.surprise ?? 1e9, by: "surprise" },
  "most turns first": { key: item => -(item.turns ?? 0), by: "turns" },
  "longest first": { key: item => -item.tokens, by: "tokens" },
  "shortest first": { key: item => item.tokens, by: "tokens" },
  "largest mismatch first": { key: item => -(item.mismatch ?? -1), by: "mismatch" },
  "slowest first": { key: item => -(item.seconds ?? -1), by: "seconds" },
};
const UNITS = { reward: "", surprise: "nats/token", tokens: "tokens", turns: "turns", mismatch: "nats/token", seconds: "s" };
const PAGE = 150; // entries of the list that are made at once

const browser = { run: 0, kind: "train", file: null, all: false, unit: "groups", sort: "as sampled", colour: "surprise", query: "" };
let entries = []; // of the list: groups or single responses
let selected = 0;
let ask_number = 0; // a later search makes an earlier one's result stale

// The files, the numbers of all responses, and how many the run has saved: read when they are first shown.
const samplesOf = run => state.index.runs[run].samples;
const readSamples = async (index, run) => { index.runs[run].samples ??= await block(`${run}/samples`); };
const filesOf = (run, kind) => samplesOf(run).files.map((file, number) => ({ ...file, number })).filter(file => file.kind === kind);

function item(run, at) {
  const rows = samplesOf(run).rows;
  const found = { at, run };
  for (const name of Object.keys(rows)) found[name] = rows[name][at];
  return found;
}

function showSamples(root) {
  const withSamples = state.index.runs.map((run, i) => [run, i]).filter(([run]) => run.responses);
  if (!withSamples.length) {
    root.replaceChildren(h("p", { class: "empty" }, "No responses were saved: logging.rollouts says which are."));
    return;
  }
  if (!withSamples.some(([, i]) => i === browser.run)) browser.run = withSamples[0][1];
  if (!samplesOf(browser.run)) return readAndShow(root);
  if (!filesOf(browser.run, browser.kind).length) browser.kind = browser.kind === "train" ? "eval" : "train";
  const files = filesOf(browser.run, browser.kind);
  if (!files.some(file => file.name === browser.file)) browser.file = files.at(-1).name;
  root.replaceChildren(controls(withSamples, files), h("div", { id: "scale" }),
    h("div", { class: "panes" },
      h("div", { class: "list" }, h("p", { id: "count", role: "status" }), h("ol", { id: "entries", role: "listbox", tabindex: 0, "aria-label": "samples" })),
      h("article", { id: "detail", "aria-live": "polite" })));
  list();
}

async function readAndShow(root) {
  const { index } = state, { run } = browser;
  const place = h("p", { class: "empty" }, "Reading the responses …");
  entries = [];
  root.replaceChildren(place);
  try {
    await readSamples(index, run);
  } catch (error) {
    place.textContent = `The responses cannot be read: ${error.message}`;
    return;
  }
  if (state.view === "samples" && place.isConnected) showSamples(root);
}

function controls(withSamples, files) {
  const choose = (name, label, options, redraw = showSamples) => {
    const select = h("select", { id: `choose-${name}`, onchange: () => { browser[name] = valueOf(select.value); selected = 0; redraw(document.getElementById("samples")); } },
      options.map(([value, text]) => h("option", { value, selected: value === browser[name] }, text)));
    return h("label", {}, h("span", {}, label), select);
  };
  const place = files.findIndex(file => file.name === browser.file);
  const step = h("input", { type: "range", id: "step", min: 0, max: files.length - 1, value: place, disabled: browser.all, "aria-label": "step",
    "aria-valuetext": `step ${files[place].step}`, oninput: () => toFile(files[+step.value].name) });
  const search = h("input", { type: "search", id: "search", placeholder: "text in prompt or response", value: browser.query,
    oninput: () => { browser.query = search.value; selected = 0; clearTimeout(search.timer); search.timer = setTimeout(list, 250); } });
  const kinds = ["train", "eval"].filter(kind => filesOf(browser.run, kind).length);
  const all = h("input", { type: "checkbox", id: "all", checked: browser.all, onchange: () => { browser.all = all.checked; selected = 0; showSamples(document.getElementById("samples")); } });
  const colours = Object.entries(COLOURINGS).filter(([name]) => name === "none" || state.index.runs[browser.run].has_tokens);
  return h("div", { class: "controls" },
    withSamples.length > 1 && choose("run", "run", withSamples.map(([run, i]) => [i, run.name])),
    kinds.length > 1 && choose("kind", "of", kinds.map(kind => [kind, kind === "train" ? "training" : "evaluation"])),
    h("div", { class: "stepper", role: "group", "aria-label": "step" },
      h("span", { class: "label" }, browser.all ? "all steps" : h("b", { id: "step-name" }, `step ${files[place].step}`)),
      h("span", { class: "row" },
        h("button", { onclick: () => turn(-1), disabled: browser.all || place <= 0, "aria-label": "earlier step" }, "‹"), step,
        h("button", { onclick: () => turn(1), disabled: browser.all || place >= files.length - 1, "aria-label": "later step" }, "›"),
        h("label", { class: "inline" }, all, " all steps"))),
    choose("unit", "show", [["groups", "groups of a prompt"], ["responses", "single responses"]], list),
    choose("sort", "order", sorts().map(name => [name, name]), list),
    choose("colour", "colour tokens by", colours.map(([name, { label }]) => [name, label]), detail),
    h("label", { class: "search" }, h("span", {}, "search"), search));
}

// Only the orders that the run's responses can have: single responses have no turns.
function sorts() {
  const talks = samplesOf(browser.run).rows.turns.some(turns => turns != null);
  return Object.keys(SORTS).filter(name => talks || SORTS[name].by !== "turns");
}

const valueOf = text => /^\d+$/.test(text) ? +text : text;

function toFile(name) {
  browser.file = name;
  selected = 0;
  const at = document.activeElement?.id;
  showSamples(document.getElementById("samples"));
  document.getElementById(at)?.focus();
}

function turn(by) {
  const files = filesOf(browser.run, browser.kind);
  const next = files[files.findIndex(file => file.name === browser.file) + by];
  if (next && !browser.all) toFile(next.name);
}

// --- the list ---

async function list() {
  const number = ++ask_number;
  const count = document.getElementById("count");
  const files = filesOf(browser.run, browser.kind).filter(file => browser.all || file.name === browser.file);
  const wanted = new Set(files.map(file => file.number));
  let items = samplesOf(browser.run).rows.file.flatMap((file, at) => wanted.has(file) ? [item(browser.run, at)] : []);
  if (browser.query) {
    count.textContent = "searching …";
    const hits = await search(files, browser.query, () => number === ask_number);
    if (number !== ask_number) return;
    items = items.filter(found => hits.has(found.at));
  }
  const sort = SORTS[browser.sort];
  entries = browser.unit === "groups" ? grouped(items) : items;
  if (browser.sort !== "as sampled") entries = [...entries].sort((a, b) => sort.key(a) - sort.key(b));
  selected = Math.min(selected, Math.max(0, entries.length - 1));
  count.textContent = counted(items.length);
  fill();
  await detail();
}

function counted(shown) {
  const { total, rows } = samplesOf(browser.run);
  const what = browser.unit === "groups" ? `${entries.length} group${entries.length === 1 ? "" : "s"}, ` : "";
  const part = rows.file.length < total ? ` The report has ${rows.file.length.toLocaleString("en")} of the run's ${total.toLocaleString("en")}.` : "";
  return `${what}${shown.toLocaleString("en")} response${shown === 1 ? "" : "s"}.${part}`;
}

function grouped(items) {
  const groups = new Map();
  for (const each of items) {
    const key = `${each.file}/${each.group}`;
    groups.has(key) ? groups.get(key).push(each) : groups.set(key, [each]);
  }
  return [...groups.values()].map(members => {
    const of = name => members.map(member => member[name]).filter(value => value != null);
    const average = name => of(name).length ? mean(of(name)) : null;
    const rewards = of("reward");
    return { ...members[0], members, reward: average("reward"), surprise: average("surprise"), tokens: average("tokens"), turns: average("turns"),
      mismatch: average("mismatch"), seconds: average("seconds"), spread: Math.max(...rewards) - Math.min(...rewards) };
  });
}

async function search(files, query, current) {
  const { rows } = samplesOf(browser.run);
  const low = query.toLowerCase(), wanted = new Map(files.map(file => [file.number, file.name])), hits = new Set();
  const by_file = new Map();
  rows.file.forEach((file, at) => { if (wanted.has(file)) (by_file.get(file) ?? by_file.set(file, []).get(file)).push(at); });
  for (const [file, places] of by_file) {
    if (!current()) return hits;
    const texts = await block(`${wanted.get(file)}.texts`);
    for (const at of places)
      if ([texts.responses[rows.row[at]], texts.prompts[rows.group[at]], ...(texts.turns[rows.row[at]] ?? []).map(turn => turn.given)]
        .some(text => text.toLowerCase().includes(low))) hits.add(at);
  }
  return hits;
}

function fill() {
  const place = document.getElementById("entries");
  const range = rewardRange();
  const many = Math.min(entries.length, Math.max(PAGE, selected + 20));
  place.replaceChildren(...entries.slice(0, many).map((entry, i) => row(entry, i, range)));
  if (many < entries.length) more(place, many, range);
  place.setAttribute("aria-activedescendant", entries.length ? `entry-${selected}` : "");
}

function more(place, from, range) {
  const last = h("li", { class: "more" }, `${entries.length - from} more …`);
  const watch = new IntersectionObserver(([seen]) => {
    if (!seen.isIntersecting) return;
    watch.disconnect();
    const to = Math.min(entries.length, from + PAGE);
    last.replaceWith(...entries.slice(from, to).map((entry, i) => row(entry, from + i, range)));
    if (to < entries.length) more(place, to, range);
  }, { root: place, rootMargin: "400px" });
  place.append(last);
  watch.observe(last);
}

function rewardRange() {
  const rewards = samplesOf(browser.run).rows.reward.filter(value => value != null);
  let low = Infinity, high = -Infinity;
  for (const value of rewards) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

function row(entry, i, range) {
  const by = SORTS[browser.sort].by;
  const members = entry.members && [...entry.members].sort((a, b) => b.reward - a.reward);
  return h("li", { id: `entry-${i}`, role: "option", "aria-selected": String(i === selected), onclick: () => select(i, true) },
    h("span", { class: "snippet" }, unhidden((entry.members ? entry.prompt : entry.start) || "(empty)")),
    h("span", { class: "facts" },
      members ? h("span", { class: "dots", title: "rewards" }, members.slice(0, 32).map(member => rewardDot(member.reward, range))) : rewardDot(entry.reward, range),
      browser.all && h("span", { class: "at" }, `step ${stepOf(entry)}`),
      h("span", { class: "metric" }, by === "reward" ? `${members ? "mean " : "reward "}${show(entry.reward)}` : `${show(entry[by])} ${UNITS[by]}`)));
}

const stepOf = entry => samplesOf(entry.run).files[entry.file].step;

function rewardDot(reward, [low, high]) {
  const share = high > low ? (reward - low) / (high - low) : 0.5;
  return h("i", { class: `reward-${Math.round(4 * share)}` });
}

function select(i, jump = false) {
  if (i < 0 || i >= entries.length) return;
  document.getElementById(`entry-${selected}`)?.setAttribute("aria-selected", "false");
  selected = i;
  if (!document.getElementById(`entry-${i}`)) fill();
  const chosen = document.getElementById(`entry-${i}`);
  chosen.setAttribute("aria-selected", "true");
  chosen.scrollIntoView({ block: "nearest" });
  document.getElementById("entries").setAttribute("aria-activedescendant", `entry-${i}`);
  detail(jump);
}

// --- one group, all its responses ---

let detail_number = 0;

async function detail(jump = false) {
  const number = ++detail_number;
  const place = document.getElementById("detail");
  document.getElementById("scale").replaceChildren(...[scale(browser.colour)].filter(Boolean));
  const entry = entries[selected];
  if (!entry) {
    place.replaceChildren(h("p", { class: "empty" }, browser.query ? "No response has this text." : "No responses here."));
    return;
  }
  const file = samplesOf(entry.run).files[entry.file];
  const [texts, tokens] = await Promise.all([block(`${file.name}.texts`), block(`${file.name}.tokens`)]);
  if (number !== detail_number) return;
  const rows = samplesOf(entry.run).rows;
  const members = rows.file.flatMap((f, at) => f === entry.file && rows.group[at] === entry.group ? [item(entry.run, at)] : []);
  if (browser.sort !== "as sampled") members.sort((a, b) => SORTS[browser.sort].key(a) - SORTS[browser.sort].key(b));
  const single = entry.members ? null : entry.at;
  const range = rewardRange();
  const head = h("header", {},
    h("button", { class: "quiet back", onclick: () => document.getElementById("entries").scrollIntoView() }, "↑ list"),
    h("span", {}, `${file.kind === "eval" ? "evaluation after step" : "step"} ${file.step}`), h("span", {}, `prompt ${texts.ids[entry.group]}`),
    h("span", {}, `${members.length} response${members.length === 1 ? "" : "s"}`));
  const cards = members.map(member => card(member, texts, tokens, member.at === single, range));
  const seen = (texts.images?.[entry.group] ?? []).map((name, i) => [name, texts.thumbnails?.[entry.group]?.[i]]);
  const images = seen.map(([name, url]) => url ? h("img", { class: "seen", src: url, alt: name, title: name }) : h("div", { class: "label" }, `image ${name}`));
  place.replaceChildren(head, ...images, h("div", { class: "prompt", dir: "auto" }, marked(texts.prompts[entry.group], browser.query)), ...cards);
  const chosen = place.querySelector(".card.chosen");
  if (chosen) chosen.scrollIntoView({ block: "nearest" });
  else if (jump === true && matchMedia("(max-width: 800px)").matches) place.scrollIntoView();
}

function card(member, texts, tokens, chosen, range) {
  const colouring = COLOURINGS[browser.colour];
  const value = browser.colour === "none" ? null : numbers(browser.colour, tokens, member.row);
  const parts = Object.entries(texts.rewards[member.row]);
  const fact = (name, text, title) => text && h("span", { class: "fact", title }, h("span", { class: "label" }, name), " ", text);
  const body = h("div", {}, texts.turns[member.row] ? turns(texts, tokens, member.row, value, colouring)
    : coloured(texts.responses[member.row], tokens.lengths?.[member.row], value, colouring, browser.query));
  const untrained = samplesOf(member.run).files[member.file].kind === "train" && tokens.weight[member.row] == null;
  if (value) body.addEventListener("mouseover", event => {
    const at = event.target.dataset?.i;
    if (at != null) event.target.title = tokenFacts(+at, member, tokens);
  });
  return h("section", { class: `card${chosen ? " chosen" : ""}`, tabindex: 0, "aria-label": `response ${member.member}` },
    h("div", { class: "facts" },
      h("span", { class: "reward" }, rewardDot(member.reward, range), h("b", {}, show(member.reward))),
      parts.length > 1 && parts.map(([name, value]) => fact(name, show(value))),
      fact("advantage", member.advantage != null && show(member.advantage)),
      fact("tokens", `${member.tokens}`),
      fact("turns", member.turns && `${member.turns}`),
      fact("surprise", member.surprise != null && show(member.surprise), "Mean of minus the engine's log-prob, nats a token"),
      fact("mismatch", member.mismatch != null && show(member.mismatch), "Mean absolute difference of the engine's and the trainer's log-probs, nats a token"),
      fact("took", member.seconds != null && `${show(member.seconds)} s`),
      member.source !== "policy" && fact("from", member.source),
      member.version_first !== member.version_last && fact("weights", `${member.version_first}–${member.version_last}`),
      fact("server", member.server),
      member.finish_reason === "length" && h("span", { class: "bad" }, "cut off"),
      Object.entries(texts.errors[member.row]).map(([name, error]) => h("span", { class: "bad" }, `${name}: ${error}`)),
      untrained && h("span", { class: "label" }, "not trained"),
      browser.colour !== "none" && !value && h("span", { class: "label" }, `no ${colouring.label} here`)),
    body);
}

// A conversation: what was said to the policy, which is never trained, and each of its own turns.
function turns(texts, tokens, row, value, colouring) {
  const text = texts.responses[row], lengths = tokens.lengths?.[row];
  let at = 0, token = 0;
  return texts.turns[row].map(({ agent, tokens: count, reward, after, given, tools, units }, i) => {
    const mine = lengths?.slice(token, token + count);
    const end = at + (mine ? mine.reduce((sum, length) => sum + length, 0) : units);
    const parts = [
      given && h("div", { class: "given", dir: "auto", translate: "no" },
        h("span", { class: "label" }, "said to the policy, not trained"), marked(given, browser.query)),
      h("div", { class: "turn-facts" }, h("b", {}, agent || "policy"), h("span", {}, `turn ${i + 1}`),
        after !== i - 1 && h("span", {}, after < 0 ? "from the prompt" : `after turn ${after + 1}`),
        h("span", {}, `${count} token${count === 1 ? "" : "s"}`),
        reward != null && h("span", { class: "turn-reward" }, `reward ${show(reward)}`),
        tools.length > 0 && h("span", {}, `tools: ${tools.join(", ")}`)),
      coloured(text.slice(at, end), mine, value, colouring, browser.query, token)];
    at = end;
    token += count;
    return h("div", { class: "turn" }, parts);
  });
}

function tokenFacts(at, member, tokens) {
  const facts = [`token ${at + 1} of ${member.tokens}`];
  for (const [name, { label, unit }] of Object.entries(COLOURINGS)) {
    const value = unit && numbers(name, tokens, member.row)?.(at);
    if (value == null || value === "" || Number.isNaN(value)) continue;
    facts.push(name === "surprise" ? `probability ${show(Math.exp(-value), "share")}` : `${label} ${show(value)} ${unit}`);
  }
  return facts.join(" · ");
}
