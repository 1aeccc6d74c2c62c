"use strict";
// Data: blocks of compressed JSON, in the page itself or, with `watch`, on the server that it came from.

// The block `index` is before this script in the page, and all others are after it.
const embedded = name => document.querySelector(`script[data-name="${CSS.escape(name)}"]`);
const watching = !embedded("index");
const whole = new Promise(end => document.addEventListener("DOMContentLoaded", end));
const recent = new Map(); // the blocks that were read last, by name
const MOST_RECENT = 60;

function block(name) {
  const found = recent.get(name) ?? read(name);
  recent.delete(name);
  recent.set(name, found);
  if (recent.size > MOST_RECENT) recent.delete(recent.keys().next().value);
  return found;
}

async function read(name) {
  if (!watching && !embedded(name)) await whole;
  const bytes = watching ? await ask(name) : decode(embedded(name).textContent);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function decode(text) {
  return Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), c => c.charCodeAt(0));
}

async function ask(name) {
  const answer = await fetch(`data/${name}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.arrayBuffer();
}

// An element with attributes and children. Strings become text, never markup.
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter(child => child != null && child !== false));
  return element;
}

const state = { index: null, hidden: new Set(), smooth: true, view: "curves" };

const words = name => state.index.words[name] ?? ["", ""];
const runsShown = () => state.index.runs.map((run, i) => [run, i]).filter(([, i]) => !state.hidden.has(i));
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [12, 4]];
const colour = i => css(`--run-${i % 6}`);

// A number as people read it; shares are percentages.
function show(value, unit = "") {
  if (value == null) return "–";
  if (unit === "share") return `${(100 * value).toFixed(Math.abs(value) < 0.1 ? 1 : 0)} %`;
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size >= 100) return value.toFixed(0);
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  return String(+value.toPrecision(3)).replace(/^-/, "−");
}

function duration(seconds) {
  const minutes = seconds / 60;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (minutes < 120) return `${minutes.toFixed(0)} min`;
  return `${(minutes / 60).toFixed(1)} h`;
}

const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
