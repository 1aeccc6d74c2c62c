// The configurations, side by side, with their differences; and the starts of each run.

let onlyDifferent = null; // null: the reader has not chosen

function showConfig(root) {
  const runs = runsShown().map(([run]) => run);
  const keys = [...new Set(runs.flatMap(run => Object.keys(run.config)))];
  const written = value => value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);
  const differs = key => new Set(runs.map(run => written(run.config[key]))).size > 1;
  const several = runs.length > 1;
  const only = several && (onlyDifferent ?? true);
  const body = h("tbody");
  const fill = () => {
    const wanted = find.value.toLowerCase();
    const shown = keys.filter(key => (!only || differs(key)) && (key.toLowerCase().includes(wanted) || runs.some(run => written(run.config[key]).toLowerCase().includes(wanted))));
    body.replaceChildren(...shown.map(key => h("tr", { class: several && differs(key) ? "differs" : "" },
      h("th", { scope: "row" }, key), runs.map(run => h("td", { "data-head": several ? run.name : "value" }, written(run.config[key]))))));
    if (!shown.length) body.append(h("tr", {}, h("td", { colspan: runs.length + 1 }, only && !wanted ? "The configurations are the same." : "No such key.")));
  };
  const find = h("input", { type: "search", placeholder: "key or value", "aria-label": "find a key", oninput: fill });
  const toggle = h("input", { type: "checkbox", checked: only, onchange: () => { onlyDifferent = toggle.checked; showConfig(root); } });
  fill();
  root.replaceChildren(
    h("h2", {}, several ? "Configurations" : "Configuration"),
    h("div", { class: "controls" }, h("label", { class: "search" }, h("span", {}, "find"), find),
      several && h("label", { class: "inline" }, toggle, " only differences")),
    keys.length ? h("div", { class: "wide" }, h("table", { class: "config" },
      several && h("thead", {}, h("tr", {}, h("th", {}, "key"), runsShown().map(([run, i]) => h("th", {}, swatch(i), run.name)))), body))
      : h("p", { class: "empty" }, "The runs have no config.yaml."),
    ...runsShown().filter(([run]) => run.starts.length).map(starts));
}

function starts([run, i]) {
  return h("div", {}, h("h2", {}, "Starts", state.index.runs.length > 1 ? [" of ", run.name] : ""), h("div", { class: "wide" }, h("table", { class: "config" },
    h("thead", {}, h("tr", {}, ["when", "from step", "host", "ranks", "command", "versions"].map(head => h("th", {}, head)))),
    h("tbody", {}, run.starts.map(start => h("tr", {},
      h("td", { "data-head": "when" }, (start.time ?? "").replace("T", " ")), h("td", { "data-head": "from step" }, `${start.from_step}`),
      h("td", { "data-head": "host" }, start.host), h("td", { "data-head": "ranks" }, `${start.world_size}`),
      h("td", { "data-head": "command", class: "code" }, start.command),
      h("td", { "data-head": "versions" }, h("details", {}, h("summary", {}, "of packages"),
        Object.entries(start.versions ?? {}).map(([name, version]) => h("div", {}, `${name} ${version}`))))))))));
}
