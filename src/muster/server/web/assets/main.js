// Who is looking, and at what? Signing in, the frame of the page, and which view the address stands for.

import { ask, hasToken, keepToken, warned } from "./api.js";
import { redeemed, takeCode } from "./signin.js";
import { EventsPage } from "./events.js";
import { follow, forget, live, tryNow, useLive, useRepeated } from "./live.js";
import { Icon } from "./parts.js";
import { PoolPage } from "./pool.js";
import { TrainingPage } from "./training.js";
import { Trainings } from "./trainings.js";
import { UsagePage } from "./usage.js";
import { html, render, useEffect, useRef, useState } from "./html.js";
import { age } from "./words.js";

const VIEWS = [["trainings", "Trainings"], ["events", "Events"], ["pool", "Pool"], ["usage", "Usage"]];
const THEMES = ["auto", "light", "dark"];
const THEME = "muster-theme";
const ASK_EVERY_MS = 5000;

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

const parts = () => location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decoded);

/** Decode a part of the address. A part that is no UTF-8 stays as it is, and names nothing. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function Page() {
  const [who, setWho] = useState(null);
  const [problem, setProblem] = useState(null);
  const [offer, setOffer] = useState(null);
  const signOut = (why) => {
    keepToken("");
    forget();
    setWho(null);
    setProblem(why instanceof Error ? why : null);
  };
  const signIn = async (token) => {
    if (token) keepToken(token);
    try {
      setWho(await ask("/v1/whoami"));
      setProblem(null);
    } catch (error) {
      if (error.status === 401) keepToken("");
      setProblem(error);
    }
  };
  useEffect(() => {
    const enter = async () => {
      const code = takeCode();
      if (!code) return;
      try {
        setOffer(await redeemed(code));
      } catch (error) {
        setProblem(error);
      }
    };
    enter();
    addEventListener("hashchange", enter);
    return () => removeEventListener("hashchange", enter);
  }, []);
  useEffect(() => void (hasToken() && signIn()), []);
  useEffect(() => {
    if (!who) return undefined;
    const gone = new AbortController();
    follow(gone.signal, signOut);
    return () => gone.abort();
  }, [who]);
  const accept = async () => {
    setOffer(null);
    await signIn(offer.token);
  };
  if (offer) return html`<${Offer} offer=${offer} who=${who} accept=${accept} refuse=${() => setOffer(null)} />`;
  if (!who) return html`<${SignIn} signIn=${signIn} problem=${problem} waiting=${hasToken() && !problem} />`;
  return html`<${Frame} who=${who} signOut=${signOut} />`;
}

/** Ask before a code signs in: anybody can send a link with a code of their own. */
function Offer({ offer, who, accept, refuse }) {
  return html`<main class="signin"><div class="card" role="dialog" aria-labelledby="offer">
    <img src="/assets/icon.svg" alt="" width="44" height="44" />
    <h1 id="offer">Sign in as ${offer.name}?</h1>
    <p>This link signs you in as <b>${offer.name}</b> (${offer.role}).${who && html` You are signed in as <b>${who.name}</b>.`}</p>
    <p class="quiet">If you did not type <code>muster dashboard</code> just now, somebody else made this link.</p>
    <button class="primary" onClick=${accept}>Sign in as ${offer.name}</button>
    <button onClick=${refuse}>Cancel</button>
  </div></main>`;
}

function SignIn({ signIn, problem, waiting }) {
  const input = useRef();
  const [busy, setBusy] = useState(false);
  useEffect(() => input.current?.focus(), [waiting]);
  if (waiting) return html`<main class="signin"><p class="quiet">Signing in…</p></main>`;
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    await signIn(input.current.value.trim());
    setBusy(false);
  };
  return html`<main class="signin"><form class="card" onSubmit=${submit}>
    <img src="/assets/icon.svg" alt="" width="44" height="44" />
    <h1>muster</h1>
    <label class="field">Token <input ref=${input} type="password" autocomplete="off" required spellcheck=${false} /></label>
    ${problem && html`<p class="problem" role="alert">${problem.message}${problem.hint && html`<br /><small>${problem.hint}</small>`}</p>`}
    <button class="primary" disabled=${busy}>Sign in</button>
    <p class="quiet">Your own control plane's is in a file (in <code>MUSTER_HOME</code>, if that is set):</p>
    <pre>cat ~/.muster/token</pre>
    <p class="quiet">Otherwise an admin makes one with <code>muster token create</code>. It is kept for this tab only.</p>
  </form></main>`;
}

function Frame({ who, signOut }) {
  const [route, setRoute] = useState(parts());
  const main = useRef();
  useEffect(() => {
    const turn = () => {
      setRoute(parts());
      scrollTo(0, 0);
      setTimeout(() => main.current?.querySelector("h1")?.focus({ preventScroll: true }));
    };
    addEventListener("hashchange", turn);
    return () => removeEventListener("hashchange", turn);
  }, []);
  const [view = "trainings", first, second] = route;
  document.title = [second ?? VIEWS.find(([name]) => name === view)?.[1], "muster"].filter(Boolean).join(" · ");
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="#/trainings"><img src="/assets/icon.svg" alt="" width="24" height="24" />muster</a>
      <nav aria-label="Views">${VIEWS.map(([name, words]) =>
        html`<a key=${name} href=${`#/${name}`} aria-current=${view === name ? "page" : null}>${words}</a>`)}</nav>
      <${Theme} />
      <span class="who" title=${`Signed in as ${who.name}`}>${who.name} <i>${who.role}</i></span>
      <button class="plain" onClick=${signOut}>Sign out</button>
    </header>
    <${Banner} />
    <main ref=${main} id="main" tabindex="-1">
      ${view === "trainings" && second !== undefined ? html`<${TrainingPage} key=${`${first}/${second}`} namespace=${first} name=${second} who=${who} />`
        : view === "pool" ? html`<${PoolPage} name=${first} />`
        : view === "events" ? html`<${EventsPage} />`
        : view === "usage" ? html`<${UsagePage} />`
        : html`<${Trainings} />`}
    </main>`;
}

/** Says so while what is shown may be old. A watch is one answer for hours: only another one tells of trouble. */
function Banner() {
  useLive(1000);
  useRepeated((signal) => ask("/v1/whoami", { signal }), ASK_EVERY_MS);
  const lost = live.lostAt && !live.connected;
  return html`<div role="status">${lost ? html`<div class="banner">
    <span><b>Disconnected.</b> The control plane does not answer; this is how things were ${age(Date.now() - live.lostAt)} ago. Trying again…</span>
    <button onClick=${tryNow}>Try now</button>
  </div>` : warned() ? html`<div class="banner"><span><b>Warning:</b> ${warned()}</span></div>` : null}</div>`;
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem(THEME) ?? "auto");
  const turn = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(THEME, next);
    showTheme(next);
    setTheme(next);
  };
  return html`<button class="plain theme" onClick=${turn} aria-label=${`Theme: ${theme}`} title=${`Theme: ${theme}`}><${Icon} name="theme" /> ${theme}</button>`;
}

showTheme(localStorage.getItem(THEME) ?? "auto");
render(html`<${Page} />`, document.getElementById("app"));
