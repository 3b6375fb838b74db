// What do ranks write? The end of it and every line as it comes, of all or of one; or the lines that have some words.

import { pieces, trainingPath } from "./api.js";
import { live } from "./live.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { count, exactly, plural } from "./words.js";

const BLOCK = 200; // lines that are drawn together: only the last block changes
const MOST_BLOCKS = 10;
const MOST_FOUND = 1000;
const LONGEST = 5000; // characters of a line that are shown
const TOGETHER_MS = 80;
const TYPING_MS = 300;
const MARKER = /^\(muster: round (\d+)\)$/;
const NO_TIME = " ".repeat(12); // as long as one

/** The log of a training with all that one can choose. With `failure`, the exit that ended it, it opens there. */
export function LogPanel({ training, failure = null }) {
  const [asked, choose] = useState({ rank: "", round: "", words: "", times: false });
  useEffect(() => {
    const untouched = !asked.rank && !asked.round && !asked.words;
    if (failure && untouched) choose({ ...asked, rank: String(failure.rank), round: String(failure.round) });
  }, [Boolean(failure)]);
  const set = (name) => (event) => choose({ ...asked, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const words = useSettled(asked.words);
  const [rank, round] = [asked.rank, asked.round].map((text) => (/^\d+$/.test(text) ? Number(text) : null));
  return html`<section class="card" aria-label="Log">
    <header><h2>Log</h2><div class="log-choice">
      <label>Rank <input type="number" min="0" placeholder="all" value=${asked.rank} onInput=${set("rank")} /></label>
      <label>Round <input type="number" min="0" placeholder="all" value=${asked.round} onInput=${set("round")} /></label>
      <input type="search" placeholder="Find in all of it" aria-label="Find in all of the log" maxlength="200" value=${asked.words} onInput=${set("words")} />
      <label title="When each line was written, on this browser's clock; in what is downloaded, in UTC">
        <input type="checkbox" checked=${asked.times} onChange=${set("times")} /> Times</label>
      <${Download} training=${training} rank=${rank} round=${round} words=${words} times=${asked.times} />
    </div></header>
    ${words ? html`<${Found} training=${training} rank=${rank} round=${round} words=${words} times=${asked.times} />`
      : html`<${Log} training=${training} rank=${rank} round=${round} times=${asked.times} label="Log"
          cause=${failure && rank === failure.rank && round === failure.round ? failure.exception : ""} />`}
  </section>`;
}

function useSettled(value) {
  const [settled, set] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => set(value), TYPING_MS);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}

function logsPath(training, { rank = null, round = null, ...more }) {
  const query = new URLSearchParams({ ...(rank === null ? {} : { rank }), ...(round === null ? {} : { round }), ...more });
  return trainingPath(training, `/logs?${query}`);
}

// Following ---------------------------------------------------------------------------------------

export function Log({ training, rank = null, round = null, tail = 500, times = false, label, cause = "" }) {
  const { uid } = training;
  const box = useRef();
  const stuck = useRef(true); // to the end, until the reader scrolls away from it
  const [blocks, setBlocks] = useState([]);
  const [state, setState] = useState("loading");
  useEffect(() => {
    const gone = new AbortController();
    if (!live.connected) return undefined; // what was read stays
    setState("loading");
    setBlocks([]);
    stuck.current = true;
    const path = logsPath(training, { rank, round, tail, follow: true, markers: true, timestamps: true });
    read(path, uid, gone.signal, setBlocks, setState);
    return () => gone.abort();
  }, [uid, rank, round, live.epoch, live.connected]);
  const focus = useMemo(() => (cause ? tracebackOf(blocks, cause) : null), [blocks, cause]);
  useLayoutEffect(() => {
    const mark = box.current.querySelector("mark");
    if (stuck.current && mark) box.current.scrollTop += mark.getBoundingClientRect().top - box.current.getBoundingClientRect().top;
    else if (stuck.current) box.current.scrollTop = box.current.scrollHeight;
  }, [blocks, focus]);
  const scrolled = ({ target }) => {
    stuck.current = target.scrollHeight - target.scrollTop - target.clientHeight < 30;
  };
  const drawn = useRef(new WeakMap()); // what did not change is not looked at again
  const draw = (block) => {
    const known = drawn.current.get(block);
    const marks = focus?.get(block.key) ?? null;
    if (known?.times === times && known.marks === marks) return known.node;
    const node = html`<${Block} key=${block.key} block=${block} times=${times} marks=${marks} />`;
    drawn.current.set(block, { node, times, marks });
    return node;
  };
  return html`<div class="log" ref=${box} onScroll=${scrolled} tabindex="0" role="log" aria-live="off" aria-label=${label}>
    ${blocks.length === 0 ? html`<p class="quiet">${state === "ended" ? "Nothing was written." : "Waiting for output…"}</p>` : blocks.map(draw)}
  </div>`;
}

/** The last traceback that ends with that exception, which may lie in two blocks: block → its first and last line. */
function tracebackOf(blocks, exception) {
  const lines = blocks.flatMap(({ key, lines }) => lines.map(({ text }, number) => ({ key, number, text })));
  const last = lines.findLastIndex(({ text }) => text.trim().split(/\s+/).join(" ").includes(exception));
  const head = lines.slice(0, last + 1).findLastIndex(({ text }) => text.includes("Traceback (most recent call last)"));
  const found = new Map();
  for (const { key, number } of last < 0 ? [] : lines.slice(head < 0 ? last : head, last + 1)) {
    found.set(key, { first: found.get(key)?.first ?? number, last: number });
  }
  return found;
}

/** Lines, and marks between them where a round begins; the lines of `marks` are highlighted. */
function Block({ block, times, marks }) {
  const parts = [];
  let plain = [];
  const close = (marked = false) => {
    const text = plain.join("\n");
    if (plain.length) parts.push(marked ? html`<pre><mark>${text}</mark></pre>` : html`<pre>${text}</pre>`);
    plain = [];
  };
  for (const [number, { text, at }] of block.lines.entries()) {
    if (number === marks?.first) close();
    if (number === (marks?.last ?? -2) + 1) close(true);
    const marker = MARKER.exec(text);
    if (marker) {
      close();
      parts.push(html`<p class="round-mark">Round ${count(Number(marker[1]))}</p>`);
    } else plain.push(times ? `${shownTime(at)} ${text}` : text);
  }
  close(block.lines.length === (marks?.last ?? -2) + 1);
  return html`<div>${parts}</div>`;
}

const shownTime = (at) => (at ? exactly(at) : NO_TIME);

/** A line as it comes: when it was written, or "-", and what. */
function taken(line) {
  const space = line.indexOf(" ");
  const text = line.slice(space + 1);
  return { at: Date.parse(line.slice(0, space)) || null, text: text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text };
}

function appended(blocks, lines) {
  const all = [...blocks];
  let rest = lines;
  const last = all.at(-1);
  if (last && last.lines.length < BLOCK) {
    const room = BLOCK - last.lines.length;
    all[all.length - 1] = { key: last.key, lines: [...last.lines, ...rest.slice(0, room)] };
    rest = rest.slice(room);
  }
  for (let key = (last?.key ?? -1) + 1; rest.length > 0; key++, rest = rest.slice(BLOCK)) all.push({ key, lines: rest.slice(0, BLOCK) });
  return all.slice(-MOST_BLOCKS);
}

async function read(path, uid, signal, setBlocks, setState) {
  const began = Date.now();
  let rest = "";
  let fresh = [];
  let timer;
  const flush = () => {
    timer = undefined;
    const added = fresh.slice(-BLOCK * MOST_BLOCKS);
    fresh = [];
    if (!signal.aborted && added.length) setBlocks((blocks) => appended(blocks, added));
  };
  try {
    for await (const piece of pieces(path, { signal, headers: { "X-Muster-Uid": uid } })) {
      const found = (rest + piece).split("\n");
      rest = found.pop();
      for (const line of found) fresh.push(taken(line));
      timer ??= setTimeout(flush, Date.now() - began > 1000 ? TOGETHER_MS : 0); // nobody waits for the first of it
    }
  } catch (error) {
    if (signal.aborted) return;
    if (error.status) fresh.push({ at: null, text: error.message });
  }
  if (rest) fresh.push(taken(rest));
  setState("ended");
  clearTimeout(timer);
  flush();
}

// Finding -----------------------------------------------------------------------------------------

/** The last lines that have these words, of all that was written. */
function Found({ training, rank, round, words, times }) {
  const [found, set] = useState(null);
  const [again, setAgain] = useState(0);
  useEffect(() => {
    const gone = new AbortController();
    set(null);
    gather(logsPath(training, { rank, round, search: words, tail: MOST_FOUND, timestamps: true }), training.uid, gone.signal)
      .then((lines) => set({ lines }), (problem) => gone.signal.aborted || set({ lines: [], problem }));
    return () => gone.abort();
  }, [rank, round, words, again]);
  const many = found?.lines.length ?? 0;
  return html`<p class="found" role="status">${found === null ? "Looking through the log…"
      : found.problem ? found.problem.message
      : many === MOST_FOUND ? `The last ${plural(many, "line")} with “${words}”.` : `${plural(many, "line")} with “${words}”.`}
    ${found && html` <button class="plain" onClick=${() => setAgain(again + 1)}>Look again</button>`}</p>
  <div class="log" tabindex="0" role="log" aria-live="off" aria-label="Found lines">
    <pre>${found?.lines.map(({ at, text }) => html`${times ? `${shownTime(at)} ` : ""}${marked(text, words)}${"\n"}`)}</pre>
  </div>`;
}

function marked(text, words) {
  const at = text.toLowerCase().indexOf(words.toLowerCase());
  return at < 0 ? text : html`${text.slice(0, at)}<mark>${text.slice(at, at + words.length)}</mark>${text.slice(at + words.length)}`;
}

async function gather(path, uid, signal) {
  let text = "";
  for await (const piece of pieces(path, { signal, headers: { "X-Muster-Uid": uid } })) text += piece;
  return text.split("\n").slice(0, -1).map(taken);
}

// Taking it away ----------------------------------------------------------------------------------

function Download({ training, rank, round, words, times }) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const save = async () => {
    setBusy(true);
    setProblem("");
    try {
      const parts = [];
      const path = logsPath(training, { rank, round, ...(words ? { search: words } : {}), ...(times ? { timestamps: true } : {}) });
      for await (const piece of pieces(path, { headers: { "X-Muster-Uid": training.uid } })) parts.push(piece);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob(parts, { type: "text/plain" }));
      link.download = [training.name, rank !== null && `rank-${rank}`, round !== null && `round-${round}`].filter(Boolean).join("-").concat(".log");
      link.click();
      URL.revokeObjectURL(link.href);
    } catch (error) {
      setProblem(error.message);
    }
    setBusy(false);
  };
  return html`<button onClick=${save} disabled=${busy}>${busy ? "Loading…" : "Download"}</button>
    ${problem && html`<span class="problem" role="alert">${problem}</span>`}`;
}
