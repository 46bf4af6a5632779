// Polls /status.json and shows it. Whatever peers and publishers wrote goes in by textContent and is never parsed as HTML.

import { Bar, Chart } from "/chart.js";

const POLL_MS = 2000;
const PATIENCE_MS = 10000;
const ROOM = 150; // samples that a chart holds: five minutes
const LONG_S = 10; // how long a fetch has been in one state is told from here on

const find = (id) => document.getElementById(id);
const samples = [];

// --- how values are shown ----------------------------------------------------------------------------------------------

function bytes(count) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  return `${Math.round(count)} B`;
}
const rate = (count) => `${bytes(count)}/s`;
const number = (count) => Math.round(count).toLocaleString("en");
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const share = (part) => `${(100 * part).toFixed(1)} %`;
const short = (id) => (id.length > 20 ? `${id.slice(0, 8)}…${id.slice(-8)}` : id);

function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

// Seconds that were won or lost.
function gain(seconds) {
  const size = Math.abs(seconds);
  return `${seconds < 0 ? "−" : ""}${size < 60 ? `${size.toFixed(1)} s` : duration(size)}`;
}

// --- tables ------------------------------------------------------------------------------------------------------------

function cell(row, text, className = "", title = "") {
  const td = row.insertCell();
  td.textContent = text;
  if (className) td.className = className;
  if (title) td.title = title;
  return td;
}

function fill(id, items, empty, columns, add) {
  const body = document.createElement("tbody");
  for (const item of items) add(body.insertRow(), item);
  if (!items.length) cell(body.insertRow(), empty, "empty").colSpan = columns;
  find(id).tBodies[0].replaceWith(body);
}

function waiting(transfer) {
  const text = transfer.detail ? `${transfer.state} (${transfer.detail})` : transfer.state;
  return transfer.state_seconds < LONG_S ? text : `${text}, for ${duration(transfer.state_seconds)}`;
}

function part(peer) {
  const now = peer.snubbed ? ", silent" : peer.outstanding ? `, ${rate(peer.rate)}` : "";
  return `${short(peer.peer)}: ${bytes(peer.bytes)}${now}`;
}

function addTransfer(row, transfer) {
  const name = transfer.model_name ?? (transfer.prompt_tokens === null ? "" : `a prompt of ${number(transfer.prompt_tokens)} tokens`);
  const what = transfer.manifest === null ? name : `${name} ${short(transfer.manifest)}`;
  cell(row, what, "", transfer.manifest ?? "");
  cell(row, waiting(transfer), transfer.state === "disk full" ? "bad" : "");
  const done = cell(row, "");
  const bar = document.createElement("progress");
  bar.max = transfer.total_bytes || 1;
  bar.value = transfer.done_bytes;
  done.append(bar, `${bytes(transfer.done_bytes)} of ${bytes(transfer.total_bytes)}`);
  const busy = transfer.peers.filter((peer) => peer.bytes || peer.outstanding);
  cell(row, busy.map(part).join("; "));
  cell(row, rate(busy.filter((peer) => peer.outstanding).reduce((sum, peer) => sum + peer.rate, 0)), "number");
}

function showTransfers(status) {
  const queue = status.queue.map((manifest) => ({ queued: manifest }));
  fill("transfers", [...status.transfers, ...queue], "none", 5, (row, transfer) => {
    if (transfer.queued === undefined) return addTransfer(row, transfer);
    cell(row, short(transfer.queued), "", transfer.queued);
    cell(row, "begun before the last stop, waiting for its turn").colSpan = 4;
  });
}

function size(artifact) {
  if (artifact.bytes === null) return "not counted yet";
  return artifact.shared_bytes ? `${bytes(artifact.bytes)}, ${bytes(artifact.shared_bytes)} of it shared` : bytes(artifact.bytes);
}

function showArtifacts(status) {
  const now = status.started + status.uptime_s;
  fill("artifacts", status.artifacts, "none", 7, (row, artifact) => {
    cell(row, artifact.model_name);
    cell(row, short(artifact.manifest_cid), "id", artifact.manifest_cid);
    cell(row, number(artifact.token_count), "number");
    cell(row, `${number(artifact.held_segments)} of ${number(artifact.segment_count)}`, "number");
    cell(row, size(artifact), "number");
    cell(row, artifact.pins.length ? artifact.pins.join(", ") : "–");
    cell(row, `${duration(Math.max(0, now - artifact.last_used))} ago`, "time");
  });
}

function standing(peer, now) {
  if (peer.banned_until !== null) return `banned for ${duration(Math.max(0, peer.banned_until - now))}`;
  if (peer.snubbed) return "silent";
  return peer.connected ? "connected" : "known";
}

function showPeers(status) {
  const now = status.started + status.uptime_s;
  fill("peers", status.peers, "nobody yet", 7, (row, peer) => {
    cell(row, short(peer.peer), "id", [peer.peer, ...peer.addresses].join("\n"));
    cell(row, standing(peer, now), peer.banned_until !== null || peer.snubbed ? "bad" : "");
    cell(row, peer.dht ? "yes" : "no");
    cell(row, peer.receiving_rate ? rate(peer.receiving_rate) : "–", "number");
    cell(row, number(peer.wanted_blocks), "number");
    cell(row, peer.sending_rate ? rate(peer.sending_rate) : "–", "number");
    cell(row, peer.outstanding_bytes ? bytes(peer.outstanding_bytes) : "–", "number");
  });
}

// --- room, tiles and charts --------------------------------------------------------------------------------------------

const roomBar = new Bar(find("room"), "What is stored, between the marks");

function showRoom({ room, collections }) {
  const { store, marks, quota } = room;
  roomBar.show(store.bytes, marks.low, marks.high);
  const why = quota && marks.high === quota ? "the quota" : "what the disk has room for";
  find("stored").textContent = `${bytes(store.bytes)} of blocks stored`;
  find("marks").textContent = collections.over_quota
    ? `above ${bytes(marks.high)}, ${why}, and all of it is pinned or leased`
    : `above ${bytes(marks.high)}, ${why}, artifacts go until ${bytes(marks.low)} are left`;
  find("marks").className = collections.over_quota ? "bad" : "";
}

function tile(label, value, note, alarm = false) {
  const box = document.createElement("div");
  if (alarm) box.className = "alarm";
  for (const [name, text, className] of [["dt", label, ""], ["dd", value, "value"], ["dd", note, "note"]]) {
    const element = document.createElement(name);
    element.textContent = text;
    element.className = className;
    box.append(element);
  }
  return box;
}

function underWay({ fetches, queued, room }) {
  const states = Object.entries(fetches).filter(([, count]) => count);
  const parts = states.map(([state, count]) => `${number(count)} ${state}`);
  if (queued) parts.push(`${number(queued)} waiting for their turn`);
  parts.push(`${counted(room.unfinished, "download")} would go on after a restart`);
  return tile("Fetches under way", number(states.reduce((sum, [, count]) => sum + count, 0)), parts.join(", "), fetches["disk full"] > 0);
}

function collected({ collections, started, uptime_s }) {
  const last = collections.last;
  const times = Object.values(collections.count).reduce((sum, count) => sum + count, 0);
  const sums = `${counted(collections.evicted, "artifact")} evicted, ${bytes(collections.freed_bytes)} freed`;
  const note = last === null ? "never since the start" : `${sums}; the last ${duration(Math.max(0, started + uptime_s - last.at))} ago, ${last.why}`;
  return tile("Collections", number(times), note, collections.over_quota);
}

function saved({ prefills }) {
  const unrated = prefills.unrated ? `${counted(prefills.unrated, "prefill")} by programs that have not measured how fast they compute` : "";
  if (!prefills.rated) return tile("Prefill saved", "unknown", unrated || "no program has told of a prefill");
  const sums = `${gain(prefills.computing_s)} of computing less ${gain(prefills.loading_s)} of loading`;
  return tile("Prefill saved", gain(prefills.saved_s), [sums, unrated].filter(Boolean).join("; without "), prefills.saved_s < 0);
}

function showTiles(status) {
  const { room, served, announcing, outcomes } = status;
  const store = room.store;
  const ended = Object.values(outcomes).reduce((sum, count) => sum + count, 0);
  const failures = status.blocks_refused + store.damaged_blocks;
  find("tiles").replaceChildren(
    tile("Artifacts", number(store.artifacts), `${number(store.complete_artifacts)} held whole; ${counted(room.pins, "pin")}, ${counted(room.leases, "lease")}`),
    tile("Blocks", number(store.blocks), `${bytes(room.disk_free_bytes)} are free on the disk`),
    collected(status),
    underWay(status),
    tile("Fetches ended", number(ended), Object.entries(outcomes).map(([outcome, count]) => `${number(count)} ${outcome}`).join(", ")),
    tile("Hit ratio", status.prompt_tokens ? share(status.hit_tokens / status.prompt_tokens) : "–",
      `${number(status.hit_tokens)} of ${number(status.prompt_tokens)} prompt tokens`),
    saved(status),
    tile("Received", bytes(status.lane_bytes + status.stream_bytes), `${bytes(status.stream_bytes)} of it over streams`),
    tile("Sent", bytes(served.bytes), `${counted(served.channels, "channel")}, ${number(served.refused)} refused`),
    tile("Verification failures", number(failures), `${number(status.blocks_refused)} of peers, ${number(store.damaged_blocks)} on our disk`, failures > 0),
    tile("Peers", number(status.connected_peers), `${number(status.dht_peers)} in the DHT, ${number(status.banned_peers)} banned`),
    tile("Announced", `${number(announcing.announced)} of ${number(announcing.keys)}`,
      announcing.late_s > 0 ? `the latest is ${duration(announcing.late_s)} late` : "none is late", status.late),
  );
}

const charts = [
  new Chart(find("charts"), "Blocks", { received: (s) => s.receiving, sent: (s) => s.sending }, rate),
  new Chart(find("charts"), "Hit ratio of prompts", { "since the start": (s) => s.hits, "these minutes": (s) => s.lately }, share, { most: 1 }),
  new Chart(find("charts"), "Prefill saved", { seconds: (s) => s.saved }, gain),
  new Chart(find("charts"), "Stored", { blocks: (s) => s.stored }, bytes),
  new Chart(find("charts"), "Peers", { connected: (s) => s.connected, "in the DHT": (s) => s.dht }, number),
  new Chart(find("charts"), "Latest announcement", { late: (s) => s.late }, duration, { most: 60 }),
];

function note(status) {
  if (samples.length && status.uptime_s < samples.at(-1).at) samples.length = 0; // the node was started again
  const before = samples.at(-1);
  const oldest = samples[0];
  const received = status.lane_bytes + status.stream_bytes;
  const per = (now, then) => (before === undefined ? null : Math.max(0, now - then) / Math.max(0.1, status.uptime_s - before.at));
  const ratio = (hits, tokens) => (tokens > 0 ? hits / tokens : null);
  samples.push({
    at: status.uptime_s,
    received,
    sent: status.served.bytes,
    receiving: per(received, before?.received),
    sending: per(status.served.bytes, before?.sent),
    prompt_tokens: status.prompt_tokens,
    hit_tokens: status.hit_tokens,
    hits: ratio(status.hit_tokens, status.prompt_tokens),
    lately: oldest === undefined ? null : ratio(status.hit_tokens - oldest.hit_tokens, status.prompt_tokens - oldest.prompt_tokens),
    saved: status.prefills.rated ? status.prefills.saved_s : null,
    stored: status.room.store.bytes,
    connected: status.connected_peers,
    dht: status.dht_peers,
    late: status.announcing.late_s,
  });
  if (samples.length > ROOM) samples.shift();
}

// --- polling -----------------------------------------------------------------------------------------------------------

function say(state, text) {
  find("state").dataset.state = state;
  find("state").textContent = text;
}

function show(status) {
  say(status.unready === null ? "ready" : "bad", status.unready === null ? `ready for ${duration(status.uptime_s)}` : status.unready);
  find("identity").textContent = `${status.version} · ${status.addresses.join(" ")}`;
  note(status);
  showRoom(status);
  showTiles(status);
  for (const chart of charts) chart.show(samples, ROOM);
  showTransfers(status);
  showArtifacts(status);
  showPeers(status);
}

async function ask() {
  try {
    const answer = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    return await answer.json();
  } catch {
    return null;
  }
}

async function poll() {
  try {
    const body = await ask();
    if (body === null) say("bad", "the node does not answer");
    else if (body.error) say("bad", `${body.error.message}. ${body.error.advice}`);
    else show(body);
  } finally {
    setTimeout(poll, POLL_MS);
  }
}

poll();
