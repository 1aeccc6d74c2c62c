// The page as a whole: views, the legend of the runs, keys, and with `watch` the refreshing.

const VIEWS = { curves: showCurves, samples: showSamples, config: showConfig };
const byId = id => document.getElementById(id);

function view(name) {
  state.view = name;
  for (const other of Object.keys(VIEWS)) {
    byId(other).hidden = other !== name;
    byId(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    byId(`tab-${other}`).tabIndex = other === name ? 0 : -1;
  }
  byId("smooth-label").hidden = name !== "curves";
  byId("legend").hidden = name === "samples"; // there, one run is chosen
  history.replaceState(null, "", `#${name}`);
  redraw();
}

const redraw = () => VIEWS[state.view](byId(state.view));

function legend() {
  const { runs } = state.index;
  byId("legend").replaceChildren(...runs.map((run, i) => h("button", {
    class: "run", title: run.directory, "aria-pressed": String(!state.hidden.has(i)), disabled: runs.length === 1,
    onclick: () => { state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i); legend(); redraw(); },
  }, swatch(i), run.name)));
}

function keys(event) {
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "checkbox" && event.target.type !== "range";
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const list = state.view === "samples";
  const inList = event.target.id === "entries";
  const actions = {
    1: () => view("curves"), 2: () => view("samples"), 3: () => view("config"),
    "?": () => byId("keys").showModal(),
    j: list && (() => select(selected + 1)), k: list && (() => select(selected - 1)),
    ArrowDown: inList && (() => select(selected + 1)), ArrowUp: inList && (() => select(selected - 1)),
    "[": list && (() => turn(-1)), "]": list && (() => turn(1)),
    c: list && nextColour,
    "/": () => { if (!list && state.view !== "config") view("samples"); document.querySelector(`#${state.view} input[type=search]`)?.focus(); },
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

function nextColour() {
  const choice = byId("choose-colour");
  choice.selectedIndex = (choice.selectedIndex + 1) % choice.options.length;
  choice.dispatchEvent(new Event("change"));
}

function tabKeys(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  const names = Object.keys(VIEWS);
  view(names[(names.indexOf(state.view) + by + names.length) % names.length]);
  byId(`tab-${state.view}`).focus();
}

function take(index) {
  state.index = index;
  document.title = `${index.runs.map(run => run.name).join(", ")} · megatron_gvpo`;
  byId("made").textContent = `megatron_gvpo · ${watching ? "as of" : "written"} ${index.made.replace("T", " ")}`;
  legend();
}

// With `watch`: ask every few seconds, and read the data again when they have changed.
const SECONDS = 3;

async function refresh() {
  const live = byId("live");
  try {
    const answer = await fetch("version", { cache: "no-store" });
    if (await answer.json() !== state.index.version) {
      recent.clear();
      const index = await block("index");
      if (samplesOf(browser.run)) await readSamples(index, browser.run);
      take(index);
      restore();
    }
    live.textContent = "live";
    live.classList.remove("bad");
  } catch (error) {
    live.textContent = "not connected";
    live.classList.add("bad");
    live.title = error.message;
  }
  setTimeout(refresh, 1000 * SECONDS);
}

// Draw the view anew, with what was open and chosen.
function restore() {
  const opened = [...document.querySelectorAll("details.more[open] summary")].map(summary => summary.firstChild.textContent);
  const [scroll, listed] = [window.scrollY, byId("entries")?.scrollTop];
  const focused = document.activeElement?.id;
  redraw();
  for (const details of document.querySelectorAll("details.more"))
    if (opened.includes(details.querySelector("summary").firstChild.textContent)) details.open = true;
  if (focused) byId(focused)?.focus({ preventScroll: true });
  if (listed) byId("entries").scrollTop = listed;
  window.scrollTo(0, scroll);
}

async function open() {
  take(await block("index"));
  byId("opening").remove();
  byId("smooth").checked = state.smooth;
  byId("smooth").addEventListener("change", () => { state.smooth = byId("smooth").checked; redraw(); });
  byId("help").addEventListener("click", () => byId("keys").showModal());
  for (const name of Object.keys(VIEWS)) byId(`tab-${name}`).addEventListener("click", () => view(name));
  document.querySelector("nav").addEventListener("keydown", tabKeys);
  document.addEventListener("keydown", keys);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  view(location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "curves");
  byId("live").hidden = !watching;
  if (watching) setTimeout(refresh, 1000 * SECONDS);
  document.documentElement.dataset.open = Math.round(performance.now());
}

open().catch(error => {
  const place = byId("opening") ?? byId("made");
  place.textContent = `The report cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
});
