"""Every bound against a peer, a file or a caller, each with its reason.

Bounds are checked before anything is allocated. A number that is not here is not a bound.
"""

from __future__ import annotations

from typing import Final

from p2pkv.units import DAY, GIB, HOUR, KIB, MIB, MINUTE

# --- formats -----------------------------------------------------------------------------------------------------------
# 256 tokens amortise one look-up and one Python turn over about 5 ms of transfer, and a prefill step of 256 costs nothing.
SEGMENT_TOKENS: Final = 256
# A block is hashed and held whole before it is trusted: 1 MiB bounds what one lie can cost.
MAX_BLOCK_BYTES: Final = MIB
# A codec may add a little to incompressible data; a coded block is never larger than this.
MAX_CODED_BLOCK_BYTES: Final = MAX_BLOCK_BYTES + 4 * KIB
# The token ids of the longest artifact, as u32, fill one block.
MAX_TOKENS: Final = MAX_BLOCK_BYTES // 4
MAX_SEGMENTS: Final = MAX_TOKENS // SEGMENT_TOKENS
# Above this many bytes the token ids leave the manifest for a block of their own, so that look-ups stay small.
MAX_INLINE_TOKEN_BYTES: Final = 256 * KIB
# The deepest published decoder stacks have about 130 layers.
MAX_LAYERS: Final = 1024
MAX_KV_HEADS: Final = 1024
MAX_HEAD_DIM: Final = 8192
# One layer of a 256-token segment with 1,024 heads still splits into no more parts than it has heads.
MAX_BLOCKS_PER_LAYER: Final = 2 * MAX_KV_HEADS
# A node of 1,024 layers with one block each is about 130 KiB; head-split layers take more.
MAX_NODE_BYTES: Final = MIB
# The formats nest at most five levels; the rest is room for later fields.
MAX_NODE_DEPTH: Final = 16
# Items of one node: 1,024 layers of a block with six fields each, and room.
MAX_NODE_ITEMS: Final = 65_536
# A header with the one root of an artifact has 58 bytes, and a root more takes 41: 4 KiB is more than anybody writes.
MAX_CAR_HEADER_BYTES: Final = 4 * KIB
# Names, licences and producer notes are for people; nobody reads more.
MAX_TEXT_BYTES: Final = 64 * KIB
# A signed statement and a few short ones beside it fit one control message. A list of revocations has some 100 bytes an item:
# more than a thousand of them, and one item may stand for everything before a sequence number.
MAX_STATEMENT_BYTES: Final = 128 * KIB
# Items of one list of revocations; with short reasons they fill a statement.
MAX_REVOCATIONS: Final = 1024
# Why something was taken back, or a key replaced: a sentence or two.
MAX_REASON_BYTES: Final = 256
# Lists of one publisher that are kept because none has all that another has: a mistake makes two of them.
MAX_LISTS_PER_PUBLISHER: Final = 4
# All that is kept of one publisher: its lists, and two successions.
MAX_STATEMENTS: Final = MAX_LISTS_PER_PUBLISHER + 2
# Keys in a row, each of which follows the one before, that trust in the first reaches.
MAX_SUCCESSIONS: Final = 8
# Manifests that disagree with our clock by less than this are not refused for it.
MAX_CLOCK_SKEW_S: Final = 10 * MINUTE

# --- verification -----------------------------------------------------------------------------------------------------
# Positions that a spot check recomputes in one forward pass: with a mask of each over a text of 16,384 tokens 64 MiB, and
# more of them take as long as computing everything.
MAX_SAMPLED_POSITIONS: Final = 1024
# Publishers of one text that may be asked to agree: nobody knows more who compute it apart from each other, on one stack.
MAX_QUORUM: Final = 16
# Publishers that are heard for a quorum beside the first: all whom the largest needs, and as many who disagree.
MAX_WITNESSES: Final = 2 * MAX_QUORUM

# --- checkpoints -------------------------------------------------------------------------------------------------------
# The safetensors format's own bound on a header; an index of shards lists the same names, a config far less.
MAX_CHECKPOINT_JSON_BYTES: Final = 100_000_000

# --- wire --------------------------------------------------------------------------------------------------------------
# Control messages: a query of 1,024 chain keys is 34 KiB, a want of 1,024 CIDs is 36 KiB.
MAX_CONTROL_BYTES: Final = 256 * KIB
# A block frame: one CID and the largest coded block or node.
MAX_FRAME_BYTES: Final = MAX_CODED_BLOCK_BYTES + 64
# Names of software, features and error codes; optional features of one side; what an error says to people.
MAX_NAME_BYTES: Final = 256
MAX_FEATURES: Final = 64
MAX_ERROR_TEXT_BYTES: Final = 4 * KIB
# Answers that wait for a peer that asks on and reads nothing: some 300 of the largest.
MAX_UNSENT_BYTES: Final = MIB
# CIDs in one want, have, dont-have or cancel; also the most that one peer may have outstanding with us.
MAX_WANTS_PER_MESSAGE: Final = 1024
MAX_WANTS_PER_PEER: Final = 4096
# Chain keys in one query: a prompt of MAX_TOKENS has this many segments, its own tail, and that of its shared part.
MAX_QUERY_KEYS: Final = MAX_SEGMENTS + 2
# Manifests in one answer: a consumer picks one or two.
MAX_QUERY_MATCHES: Final = 16
# A peer must say hello, and answer a query, within this.
HELLO_TIMEOUT_S: Final = 10.0
QUERY_TIMEOUT_S: Final = 5.0
# A dial that takes longer than this is worth less than the peers that answered meanwhile.
PEER_CONNECT_TIMEOUT_S: Final = 5.0
# Streams from one peer that we serve at once; one fetch needs one.
MAX_STREAMS_PER_PEER: Final = 8

# Dialling: TCP, Noise, yamux and the protocol's negotiation take a handful of round trips.
DIAL_TIMEOUT_S: Final = 5.0
# The next address of a peer is tried when the one before has not answered within this (RFC 8305's delay).
DIAL_STAGGER_S: Final = 0.25
# Addresses of one peer that are dialled: a record may list any number.
MAX_ADDRESSES_PER_PEER: Final = 8
# A peer that takes none of our bytes for this long is gone; a paused reader of ours never waits longer.
SEND_STALL_S: Final = 30.0
# Closing a stream writes one small frame; a connection that does not take it within this is left to die.
CLOSE_TIMEOUT_S: Final = 1.0
# After we closed a stream, its peer has this long to close its own end before the stream is reset.
CLOSE_LINGER_S: Final = 5.0
# Peers connected to us at once.
MAX_CONNECTIONS: Final = 256

# --- download ----------------------------------------------------------------------------------------------------------
# A silent peer loses its blocks after this, or after mean + 4 deviations where that is longer (see pains: stalls).
MIN_BLOCK_TIMEOUT_S: Final = 2.0
MAX_BLOCK_TIMEOUT_S: Final = 30.0
# One whose pauses are known loses them after this already, or mean + 4 deviations, where others are heard meanwhile: then our
# own machine and our own link are not what pauses.
MIN_STALL_S: Final = 0.35
# Asked of a peer before its rate is known: two common blocks, so that a crowd behind one provider does not commit it for long.
INITIAL_WINDOW_BYTES: Final = 384 * KIB
MAX_WINDOW_BLOCKS: Final = 256
# Outstanding work per peer, in seconds of its measured rate: long enough to hide a round trip, short enough to lose little.
WINDOW_SECONDS: Final = 0.5
# A pause of a peer in the tail that is shorter than this is a matter of scheduling, not of the peer.
TAIL_STALL_S: Final = 0.1
# Peers remembered for having sent blocks, to be asked first the next time.
MAX_SOURCES: Final = 256
# Deadlines (segments) within which rarity comes first: 4,096 tokens. Where many fetch at once, all wait for what few have.
RARITY_DEADLINES: Final = 16
# Duplicate bytes that the tail of one session may cost: with headers and messages the wire then stays below 1.02 of the data.
MAX_DUPLICATE_SHARE: Final = 0.01
# A proven lie costs a peer this long.
BAN_SECONDS: Final = 30 * MINUTE
# Peers of one fetch: beyond this each adds more messages than speed.
MAX_PEERS_PER_FETCH: Final = 32

# --- upload ------------------------------------------------------------------------------------------------------------
# What a peer may be sent in one turn: the largest block, or several small ones.
UPLOAD_QUANTUM_BYTES: Final = MAX_CODED_BLOCK_BYTES
# Granted to one peer and not yet sent: no cancel comes too late for more. Half of it is sent on a fast lane while the event
# loop hears of the other half, some milliseconds for a turn of the loop.
MAX_UPLOAD_BYTES_PER_PEER: Final = 8 * MAX_CODED_BLOCK_BYTES
# The same of all peers together. A peer that has nothing yet may have one block beyond it, so that nobody starves: with
# MAX_CONNECTIONS peers that read nothing, 320 MiB.
MAX_UPLOAD_BYTES: Final = 64 * MIB
# A peer that was not served for this long is a newcomer: leaving and coming back at once is no way to the front.
NEWCOMER_S: Final = 10.0
# What may leave at once under a limit of the rate, in seconds of it: a few turns of the event loop.
UPLOAD_BURST_S: Final = 0.1
# Look-ups for queries at once: a storm of them leaves worker threads to those who read blocks.
MAX_QUERIES_AT_ONCE: Final = 4

# --- routing -----------------------------------------------------------------------------------------------------------
# Receivers drop provider records beyond 10 messages in 10 s from one peer: stay below it, by their clock as well.
ANNOUNCE_BURST: Final = 8
ANNOUNCE_WINDOW_S: Final = 11.0
# Provider records expire after 48 h (libp2p's Kademlia specification); announce again with two chances to spare.
PROVIDER_RECORD_S: Final = 48 * HOUR
ANNOUNCE_PERIOD_S: Final = 22 * HOUR
# Provider records that a node keeps for others, some 350 bytes each: 45 MiB. In a network of a thousand nodes which provide
# five thousand keys each, a node has 100,000 of them.
MAX_PROVIDER_RECORDS: Final = 128 * 1024
LOOKUP_TIMEOUT_S: Final = 5.0
MAX_PROVIDERS_PER_LOOKUP: Final = 20
# One question to one DHT peer, after it is connected; the others are asked meanwhile.
DHT_REQUEST_TIMEOUT_S: Final = 2.0
# A DHT answer: 20 providers and 20 closer peers with addresses and signed records are about 40 KiB.
MAX_DHT_MESSAGE_BYTES: Final = 256 * KIB
# Requests that wait for one DHT peer; beyond it the oldest are still to be answered and new ones are refused.
MAX_DHT_QUEUE_PER_PEER: Final = 256
# DHT peers asked at once by one look-up (Kademlia's alpha), and the closest peers that are asked and told (its k).
DHT_PARALLEL: Final = 10
DHT_CLOSEST: Final = 20
# Start-up waits this long for the bootstrap peers, then goes on without them and keeps trying.
JOIN_TIMEOUT_S: Final = 5.0
# A node looks itself up again after the first of these seconds, the second, ...; the last one repeats.
DHT_REFRESH_S: Final = (1.0, 5.0, 30.0, 2.0 * MINUTE, 10.0 * MINUTE)
# An announcement is not late while it only waits for the pace that receivers bear.
LATE_ANNOUNCEMENT_S: Final = 60.0

# A publisher's statements are looked up so often: what it takes back is obeyed within this, and a minute, by a running node
# that reaches anybody who knows.
STATEMENTS_PERIOD_S: Final = 30.0 * MINUTE
# ... and again so soon where nobody answered; a fetch of the publisher's artifacts asks sooner, but not more often than this.
STATEMENTS_RETRY_S: Final = 5.0 * MINUTE
# Those who are asked in one look-up: one that tells an old list, or nothing, hides nothing that another tells.
MAX_STATEMENT_PROVIDERS: Final = 8
# One of them has so long for all of it, the dial included.
STATEMENTS_TIMEOUT_S: Final = 10.0
# A node that heard nothing of what a publisher takes back for so long is told to its user: look-ups had no answer all day, and
# a machine that is off over night is no reason.
STATEMENTS_STALE_S: Final = 1.0 * DAY
# Look-ups at once: with that, those of the most publishers that are followed end within a period, also where peers are silent.
MAX_STATEMENT_LOOKUPS: Final = 16
# Publishers that are looked up in one period; those whom rules name first.
MAX_FOLLOWED_PUBLISHERS: Final = 1024
# How often a node looks whether the statements in its home have changed, by `p2pkv revoke` for example.
STATEMENTS_SCAN_S: Final = 5.0

# --- bulk lane ---------------------------------------------------------------------------------------------------------
# A bulk token is used at once by the peer that asked for it, or never.
BULK_TOKEN_SECONDS: Final = 10.0
# A stranger who connects to the bulk port and says nothing is cut off after this.
BULK_HANDSHAKE_TIMEOUT_S: Final = 5.0
# Lanes in each direction; each has a buffer of one block, and one that sends a thread.
MAX_BULK_CONNECTIONS: Final = 256
# Connections that have not shown their token yet; one more drops the oldest, so that silent ones never shut honest ones out.
MAX_BULK_STRANGERS: Final = 64
# Offers that wait for their consumer: several times the lanes that could come of them within BULK_TOKEN_SECONDS.
MAX_BULK_OFFERS: Final = 1024
# AES-GCM is good for 2^24.5 full records of one key (RFC 8446, section 5.5), some 370 GiB; a lane ends well before.
MAX_BULK_LANE_BYTES: Final = 256 * GIB

# --- store -------------------------------------------------------------------------------------------------------------
# A store of 100 GB has 400 packs, which a start opens in a blink; one that is mostly dead is soon rewritten.
MAX_PACK_BYTES: Final = 256 * MIB
# A pin's name is shown in tables and typed in a shell.
MAX_PIN_NAME_BYTES: Final = 128
# Above the high mark artifacts are collected down to the low one, so that collecting is rare: its share of the high one.
LOW_MARK_SHARE: Final = 0.9
# Room that stays free on the disk whatever the quota: for the index, for logs, for others. The smaller of the two counts.
MIN_FREE_BYTES: Final = 1024 * MIB
MIN_FREE_SHARE: Final = 0.05
# Room that is kept for the transaction which makes more on a full disk: some thousand segments are taken off the list in it.
RESERVE_BYTES: Final = 4 * MIB
# The structure of an index up to this size is checked at each start: a tenth of a second for 300,000 segments, two
# milliseconds for those of 100,000 blocks. What is wrong within a larger one shows in use.
MAX_CHECKED_INDEX_BYTES: Final = 64 * MIB
# Damaged indexes that are kept aside, the newest ones: what was in them is a matter for experts, and rarely wanted.
MAX_SET_ASIDE_INDEXES: Final = 3
# Some 60,000 pins; the copy of them is written whole at each change.
MAX_PINS_FILE_BYTES: Final = 16 * MIB
# Whoever fetched has so long to read what the answer located, before it may be collected.
READ_LEASE_S: Final = 300.0
# Imports, exports and publications have leases of so long, renewed while they go on. What an import had stored when it was
# interrupted is kept for as long, so that the next one goes on from there.
WORK_LEASE_S: Final = 10.0 * MINUTE
# How long a block that was found intact is served without hashing it again, while its file is unchanged: a crowd that comes
# for one artifact is served at the price of one reading, and a disk that rots is noticed soon.
REVERIFY_AFTER_S: Final = 10.0 * MINUTE
# What a system takes for a place in a file: 63 bits. Beyond it, asking would be an error of Python's and not of the disk.
MAX_FILE_OFFSET: Final = 2**63 - 1
# What an idle node brings nearer at once, between two looks at whether it is still idle.
READY_STEP_BYTES: Final = 4 * MIB
# The shortest `sun_path` of the platforms we run on has 104 bytes, the closing zero included.
MAX_SOCKET_PATH_BYTES: Final = 103
# A process that was killed holds its lock until the system has taken its memory down; `p2pkv doctor` holds it for an instant.
LOCK_PATIENCE_S: Final = 0.5
# Some 10,000 publishers with notes; nobody keeps more by hand, and the file is read whole.
MAX_TRUST_FILE_BYTES: Final = 4 * MIB
# A note says in a line or two who a publisher is.
MAX_TRUST_NOTE_BYTES: Final = KIB
# Argon2id for the passphrase of a new key file: libsodium's moderate choice, some 0.7 s a guess.
KEY_FILE_OPERATIONS: Final = 3
KEY_FILE_MEMORY_BYTES: Final = 256 * MIB
# The same as a key file may ask for it: libsodium's choice for the most sensitive, some 4 s; beyond it nothing is derived.
MAX_KEY_FILE_OPERATIONS: Final = 4
MAX_KEY_FILE_MEMORY_BYTES: Final = 1024 * MIB
# A key file has some 300 bytes; that of sequence numbers less.
MAX_KEY_FILE_BYTES: Final = KIB
# A sentence that somebody remembers, or what a password manager makes.
MAX_PASSPHRASE_BYTES: Final = KIB

# --- command line ------------------------------------------------------------------------------------------------------
# A text of MAX_TOKENS has some 4 bytes a token, 16 MiB is 64: more is no text for one artifact.
MAX_TEXT_FILE_BYTES: Final = 16 * MIB

# --- control -----------------------------------------------------------------------------------------------------------
# A request body is at most a prompt of MAX_TOKENS as JSON numbers, of up to ten digits: less than half of this.
MAX_REQUEST_BYTES: Final = 8 * MIB
# Daemon and embedded node end within this after the first request to stop.
SHUTDOWN_GRACE_S: Final = 2.0
# Imports, exports and publications at once: each keeps a thread and the disk busy, and more of them are not faster.
MAX_FILE_WORK: Final = 4
# A lease of a reader lasts at most so long without being renewed: after that, whoever took it is gone.
MAX_LEASE_S: Final = 60.0 * MINUTE
# Leases of readers at once: programs on this machine, a few for each of them.
MAX_LEASES: Final = 1024
# Rows of each table of the status page, which is made anew every two seconds; nobody reads more.
MAX_STATUS_ROWS: Final = 200
# Of a name that a publisher chose, on the status page: one line of a table, and room.
MAX_STATUS_NAME_CHARS: Final = 200
# Nodes of artifacts that are read for one look at the page, to learn what their blocks take: a tenth of a second of one core.
MAX_NODES_SIZED: Final = 64
# Connections to the port of the status page: a browser opens six, a scraper one. One more takes the place of the oldest.
MAX_WEB_CONNECTIONS: Final = 32
# A connection to it is for one request, and all of that is over within this: an answer takes milliseconds, on a busy machine a
# second.
WEB_CONNECTION_S: Final = 10.0
# Worker threads that look at the store for it: however many ask, the others are left to those who read and write blocks.
MAX_WEB_THREADS: Final = 2
# What a program tells of a prefill: nobody waits a day for one, and no machine computes so slowly or so fast.
MAX_PREFILL_S: Final = 1.0 * DAY
MIN_TOKENS_PER_S: Final = 0.01
MAX_TOKENS_PER_S: Final = 1e8
# Models and devices whose rate of computing is remembered; one more takes the place of the one that was used longest ago.
MAX_PREFILL_RATES: Final = 256
# A program tells of a prefill before it has its first token, and so it does not wait longer than this for the answer, which
# takes a millisecond or two.
TELL_PATIENCE_S: Final = 0.25

# --- doctor ------------------------------------------------------------------------------------------------------------
# A daemon that is well tells its status in milliseconds, in a second or two on a machine that swaps.
DOCTOR_PATIENCE_S: Final = 5.0
# Descriptors of a busy node: connections and lanes in both directions, strangers at the bulk port, and files.
MIN_OPEN_FILES: Final = 2 * MAX_CONNECTIONS + 2 * MAX_BULK_CONNECTIONS + MAX_BULK_STRANGERS + 128
# In less room than this neither the log of the index nor the blocks under way can be written.
FULL_DISK_BYTES: Final = 32 * MIB
# A store makes few files; without any inode left it makes none, however many bytes are free.
MIN_FREE_INODES: Final = 256
# 2026-01-01 in seconds since the epoch: a clock that is right has not shown an earlier time to this version.
EARLIEST_TIME_S: Final = 1_767_225_600
