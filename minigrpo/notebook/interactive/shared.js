"use strict";
const byId = id => document.getElementById(id), sum = values => values.reduce((a, b) => a + b, 0);
const softmax = z => { const most = Math.max(...z), e = z.map(x => Math.exp(x - most)), all = sum(e); return e.map(x => x / all); };
const DATA = JSON.parse(byId("data")?.textContent || "null"); // what interactive.page() was given

// Chance that is the same each time: a generator (Mulberry32), and a place of a list of probabilities.
function seeded(seed) {
  return () => {
    seed = seed + 0x6d2b79f5 | 0;
    let t = Math.imul(seed ^ seed >>> 15, 1 | seed);
    t = t + Math.imul(t ^ t >>> 7, 61 | t) ^ t;
    return ((t ^ t >>> 14) >>> 0) / 4294967296;
  };
}
const drawn = (p, random) => { let left = random(); return Math.max(0, p.findIndex(q => (left -= q) < 0)); };

// "Guess first, then press.": each of [name, question, act] is a button in #tries, and show() says what act() answers.
function offer(tries, show) {
  byId("tries").replaceChildren(...tries.map(([name, question, act]) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.textContent = name;
    button.addEventListener("click", () => { show(act()); byId("said").scrollIntoView({block: "nearest"}); });
    item.append(button, ` ${question}`);
    return item;
  }));
}

// Without this, Back would bring old values into the fields, and not what was computed from them.
addEventListener("DOMContentLoaded", () => document.querySelectorAll("input, select").forEach(field => { field.autocomplete = "off"; }));

// In a notebook the frame is as high as the page, and the page has the notebook's theme.
{
  const frame = (() => { try { return window.frameElement; } catch { return null; } })(), around = frame?.ownerDocument;
  if (frame) new ResizeObserver(() => { frame.style.height = `${document.documentElement.offsetHeight + 4}px`; }).observe(document.body);
  function follow() {
    let kept;
    try { kept = localStorage.theme; } catch { /* not allowed here */ }
    const [own, site] = [document, around].map(there => there?.documentElement.dataset.theme);
    const lab = {true: "light", false: "dark"}[around?.body.dataset.jpThemeLight];
    const theme = [own, site, lab, kept].find(name => name === "light" || name === "dark");
    document.documentElement.style.colorScheme = theme || "light dark";
  }
  for (const {documentElement, body} of [document, around].filter(Boolean)) {
    for (const root of [documentElement, body]) new MutationObserver(follow).observe(root, {attributeFilter: ["data-theme", "data-jp-theme-light"]});
  }
  follow();
}
