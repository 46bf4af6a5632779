"""The objects of the control API by name: errors, answers, events."""

from __future__ import annotations

from typing import Any, Final

from p2pkv.errors import Fault, error_classes
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import MAX_TRUST_NOTE_BYTES
from p2pkv.store.progress import Step
from p2pkv.swarm.report import FetchState
from p2pkv.trust.rules import Action, Namespace
from p2pkv_node.collecting import Why
from p2pkv_node.openapi.schema import (
    BASE64,
    BOOLEAN,
    BYTES,
    CID,
    COUNT,
    EPOCH,
    HEX_DIGEST,
    PEER,
    RATE,
    SECONDS,
    TEXT,
    Schema,
    by,
    constant,
    items,
    nullable,
    obj,
    one_of,
    ref,
    said,
)
from p2pkv_node.snapshot import STARTING
from p2pkv_node.transfers import Outcome

# A publisher's numbers: integers of the manifest.
_INTEGER: Final[Schema] = {"type": "integer"}

_ERROR_FIELDS: Final[dict[str, Schema]] = {
    "code": one_of(*sorted(error_classes())),
    "fault": said(one_of(*Fault), "Whose doing it is."),
    "message": said(TEXT, "What happened."),
    "advice": said(TEXT, "What to do."),
}

_ACTION: Final = one_of(*Action)
_NOTE: Final[Schema] = {"type": "string", "maxLength": MAX_TRUST_NOTE_BYTES}
_RULE_SCOPE: Final[dict[str, Schema]] = {
    "model": said(HEX_DIGEST, "A model id."),
    "licence": said(TEXT, "The exact licence."),
    "namespace": one_of(*Namespace),
}

_PLACE: Final[Schema] = {
    "type": "array",
    "description": "A file in the folder `blocks/` of the home, and an offset and a size in it, in bytes.",
    "prefixItems": [{"type": "string", "pattern": r"^[0-9]{8,}\.pack$"}, BYTES, BYTES],
    "minItems": 3,
    "maxItems": 3,
}

_LAYERS: Final[Schema] = {
    **items(COUNT, minItems=2, maxItems=2),
    "description": "The first layer, and the one after the last, counted from 0.",
}

_REPORT_OF_FILE: Final[dict[str, Schema]] = {
    "event": constant("report"),
    "manifest": CID,
    "tokens": COUNT,
    "blocks": said(COUNT, "Blocks and nodes of the artifact."),
    "bytes": said(BYTES, "Bytes of the file."),
}


def _last(name: str) -> Schema:
    """Return the events of a call on a file: how far it is, and in the end its report or an error."""
    return {"oneOf": [ref("FileProgress"), ref(name), ref("ErrorEvent")]}


_STATS: Final[dict[str, Schema]] = {
    "started": EPOCH,
    "uptime_s": SECONDS,
    "unready": said(nullable(TEXT), "Why the node cannot do its work now."),
    "room": obj(
        {
            "store": ref("StoreStatistics"),
            "quota": said(BYTES, "Bytes of blocks that the operator allows; 0: as the disk has room."),
            "marks": obj({"high": BYTES, "low": BYTES}, description="Above `high` the node collects until `low` are left."),
            "disk_free_bytes": BYTES,
            "pins": COUNT,
            "leases": COUNT,
            "unfinished": said(COUNT, "Downloads that go on at the next start if the node ends."),
        }
    ),
    "collections": obj(
        {
            "count": obj(dict.fromkeys(Why, COUNT)),
            "evicted": COUNT,
            "freed_bytes": BYTES,
            "last": nullable(obj({"at": EPOCH, "why": one_of(*Why), "evicted": COUNT, "freed_bytes": BYTES})),
            "over_quota": BOOLEAN,
        }
    ),
    "lane_bytes": said(BYTES, "Verified bytes that came over bulk lanes."),
    "stream_bytes": said(BYTES, "Verified bytes that came over libp2p streams."),
    "blocks_refused": said(COUNT, "Blocks of peers with a wrong hash."),
    "fetches": said(obj(dict.fromkeys((STARTING, *FetchState), COUNT)), "Those under way, by what they wait for."),
    "queued": said(COUNT, "Downloads of the last run that wait for their turn."),
    "outcomes": obj(dict.fromkeys(Outcome, COUNT)),
    "prompt_tokens": COUNT,
    "hit_tokens": COUNT,
    "prefills": obj(
        {
            "rated": said(COUNT, "Prefills of whose model it is known how fast it is computed here."),
            "unrated": COUNT,
            "computing_s": said(SECONDS, "What computing the loaded tokens would have taken."),
            "loading_s": said(SECONDS, "What loading them took, or looking in vain."),
            "saved_s": said({"type": "number"}, "The first less the second, in seconds; below zero for a loss."),
        }
    ),
    "served": obj({"channels": COUNT, "blocks": COUNT, "bytes": BYTES, "refused": COUNT, "rate": RATE}),
    "announcing": ref("AnnouncerStatistics"),
    "connected_peers": COUNT,
    "dht_peers": COUNT,
    "banned_peers": COUNT,
    "tasks": said(COUNT, "Tasks of the event loop."),
}

SCHEMAS: Final[dict[str, Any]] = {
    "Error": obj({"error": obj(_ERROR_FIELDS)}, description="What every call answers that failed."),
    "ErrorEvent": obj({"event": constant("error"), **_ERROR_FIELDS}, description="The last event of a call that failed."),
    "Places": {
        **by(nullable(_PLACE)),
        "description": "Where blocks lie, by CID; null for one that the node has lost. Readers hash what they read.",
    },
    # --- the node ------------------------------------------------------------------------------------------------------
    "StoreStatistics": obj(
        {"blocks": COUNT, "bytes": BYTES, "artifacts": COUNT, "complete_artifacts": COUNT, "damaged_blocks": COUNT}
    ),
    "AnnouncerStatistics": obj({"keys": COUNT, "announced": COUNT, "late_s": SECONDS}),
    "Status": obj(
        {
            "version": TEXT,
            "peer_id": PEER,
            "addresses": said(items(TEXT), "Full multiaddrs that others may bootstrap from."),
            "home": TEXT,
            "uptime_s": SECONDS,
            "connected_peers": items(PEER),
            "dht_peers": said(items(PEER), "In the routing table."),
            "fetches": said(COUNT, "Under way now."),
            "store": ref("StoreStatistics"),
            "served": obj(
                {
                    "channels": COUNT,
                    "blocks": COUNT,
                    "bytes": BYTES,
                    "refused": COUNT,
                    "rate": RATE,
                    "outstanding_by_peer": by(BYTES),
                    "rate_by_peer": by(RATE),
                }
            ),
            "announcing": ref("AnnouncerStatistics"),
            "banned_peers": items(PEER),
            "trusted_publishers": COUNT,
            "condition": obj(
                {
                    "pid": COUNT,
                    "listen": items(TEXT),
                    "listening": items(TEXT),
                    "bulk_port": nullable(COUNT),
                    "inbound_connections": COUNT,
                    "bootstrap_peers": COUNT,
                    "bootstrap_connected": COUNT,
                    "open_files_limit": nullable(COUNT),
                }
            ),
        }
    ),
    "Stats": obj(_STATS, description="What /metrics tells, too: sums since the start, and what is now."),
    "Peers": obj(
        {
            "peers": items(
                obj(
                    {
                        "peer": PEER,
                        "connected": BOOLEAN,
                        "dht": said(BOOLEAN, "It is in the routing table."),
                        "banned_until": nullable(EPOCH),
                        "receiving_rate": said(RATE, "What fetches get from it, in bytes per second."),
                        "wanted_blocks": said(COUNT, "Blocks that were asked of it and did not come yet."),
                        "snubbed": said(BOOLEAN, "It has fallen silent."),
                        "sending_rate": said(RATE, "What it is sent, in bytes per second."),
                        "outstanding_bytes": said(BYTES, "Bytes that were granted to it and are not sent yet."),
                        "addresses": said(items(TEXT), "Multiaddrs, as far as they are known."),
                    }
                )
            )
        }
    ),
    # --- artifacts -----------------------------------------------------------------------------------------------------
    "Artifacts": obj(
        {
            "artifacts": items(
                obj(
                    {
                        "manifest_cid": CID,
                        "model_id": HEX_DIGEST,
                        "model_name": TEXT,
                        "dtype": one_of(*Dtype),
                        "token_count": COUNT,
                        "segment_count": COUNT,
                        "publisher": said(TEXT, "did:key"),
                        "sequence": _INTEGER,
                        "created": _INTEGER,
                        "expires": nullable(_INTEGER),
                        "complete": said(BOOLEAN, "All segments are held."),
                        "added": EPOCH,
                        "last_used": EPOCH,
                    }
                )
            )
        }
    ),
    "ArtifactEnvelope": obj({"manifest": CID, "envelope": BASE64, "token_block": nullable(BASE64)}),
    "Removed": obj({"manifest": CID, "removed": BOOLEAN}),
    "Collected": obj(
        {
            "evicted": items(obj({"manifest_cid": CID, "model_name": TEXT, "bytes": BYTES, "last_used": EPOCH})),
            "blocks": COUNT,
            "bytes": BYTES,
            "freed": said(_INTEGER, "Bytes that the disk got back."),
            "left": BYTES,
            "over_quota": BOOLEAN,
            "dry_run": BOOLEAN,
        }
    ),
    "Lease": obj(
        {"lease": TEXT, "manifest": CID, "expires": EPOCH, "blocks": ref("Places")},
        description="Everything of the artifact stays where it is until the lease expires.",
    ),
    # --- rules ---------------------------------------------------------------------------------------------------------
    "Rules": obj({"rules": items(ref("Rule"))}),
    "Rule": obj(
        {"action": _ACTION, "publisher": TEXT, **_RULE_SCOPE, "note": TEXT, "added": EPOCH},
        optional=tuple(_RULE_SCOPE),
        description="What the scope leaves out, the rule leaves open.",
    ),
    "NewRule": obj(
        {"action": _ACTION, "publisher": TEXT, **_RULE_SCOPE, "note": _NOTE},
        optional=("action", *_RULE_SCOPE, "note"),
        description="Accepts where no action is given.",
    ),
    "Pins": obj({"pins": items(obj({"name": TEXT, "manifest": CID, "created": EPOCH}))}),
    # --- events --------------------------------------------------------------------------------------------------------
    "FetchEvent": {
        "oneOf": [
            ref("FetchProgress"),
            ref("FetchMatched"),
            ref("FetchSegment"),
            ref("FetchWitness"),
            ref("FetchReport"),
            ref("ErrorEvent"),
        ]
    },
    "FetchProgress": obj(
        {
            "event": constant("progress"),
            "state": one_of(*FetchState),
            "detail": said(TEXT, "What it waits for, for people."),
            "done_bytes": BYTES,
            "total_bytes": BYTES,
            "peers": items(
                obj(
                    {
                        "peer": PEER,
                        "bytes": BYTES,
                        "blocks": COUNT,
                        "outstanding": COUNT,
                        "rate": RATE,
                        "snubbed": BOOLEAN,
                    }
                )
            ),
        }
    ),
    "FetchMatched": obj(
        {
            "event": constant("matched"),
            "manifest": CID,
            "hit_tokens": COUNT,
            "segments": COUNT,
            "blocks": ref("Places"),
        }
    ),
    "FetchSegment": obj({"event": constant("segment"), "index": COUNT, "blocks": ref("Places")}),
    "FetchWitness": obj({"event": constant("witness"), "manifest": CID, "blocks": ref("Places")}),
    "FetchReport": obj(
        {
            "event": constant("report"),
            "manifest": nullable(CID),
            "token_count": COUNT,
            "hit_tokens": COUNT,
            "segments": COUNT,
            "layers": nullable(_LAYERS),
            "complete": BOOLEAN,
            "local_bytes": BYTES,
            "bytes_by_peer": by(BYTES),
            "rate_by_peer": by(RATE),
            "duplicate_bytes": BYTES,
            "blocks_refused": COUNT,
            "peers_lost": COUNT,
            "peers_dropped": items(PEER),
            "refusals": items(obj({"manifest": CID, "code": TEXT, "message": TEXT, "advice": TEXT})),
            "times": said(by(SECONDS), "Seconds since the start; a time is absent where it did not come to that."),
        }
    ),
    "FileProgress": obj({"event": constant("progress"), "state": one_of(*Step), "done_bytes": BYTES, "total_bytes": BYTES}),
    "PublishEvent": _last("PublishReport"),
    "PublishReport": obj({"event": constant("report"), "manifest": CID, "segments": COUNT}),
    "ImportEvent": _last("ImportReport"),
    "ImportReport": obj(
        {
            **_REPORT_OF_FILE,
            "publisher": said(TEXT, "did:key"),
            "new_bytes": said(BYTES, "Bytes of blocks and nodes that were not here already."),
        }
    ),
    "ExportEvent": _last("ExportReport"),
    "ExportReport": obj({**_REPORT_OF_FILE, "file": TEXT}),
}
