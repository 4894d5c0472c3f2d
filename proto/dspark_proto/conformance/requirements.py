"""The requirements of SPEC.md that cases refer to: anchor -> sentence, shown with every failure.

A copy of the standard's sentences, so that a report needs no file beside it; made by `python -m dspark_proto.standard
--requirements`, and a test holds it to SPEC.md. Called by `record`; decides nothing.
"""

from __future__ import annotations

from typing import Final

REQUIREMENTS: Final[dict[str, str]] = {
    "REQ-ROL-1": "A message on one connection MUST NOT change the state of another.",
    "REQ-ROL-2": (
        "However many ranks a verifier has, it is one peer. It MUST have one connection to a drafter, on which one of "
        "them speaks for all: a round has one item (a retry is the same one) and at most one commit, a generation that "
        "is lost has one successor. A proposal that one rank cannot use is discarded whole on all of them (REQ-CMP-3); "
        "the drafter sees a round without a commit."
    ),
    "REQ-LIF-1": (
        "An action without an entry MUST be refused: locally as an error of the caller, from the peer as "
        "UNEXPECTED_MESSAGE or the code that its section names."
    ),
    "REQ-LIF-2": "Before ACCEPT, both sides MUST NOT allocate staging or reply memory for the connection.",
    "REQ-LIF-3": (
        "A drafter that gets anything but HELLO before a connection is accepted MUST drop it, and SHOULD send ERROR "
        "HELLO_REQUIRED with scope CONNECTION and no key, once until the next HELLO. It MUST NOT answer an ERROR so, "
        "nor a frame that comes between HELLO and its answer. So a verifier learns that a worker has restarted."
    ),
    "REQ-LIF-4": (
        "HELLO on a live connection MUST end it first: all slots, keys in flight, cached replies and credit of the old "
        "one are dead."
    ),
    "REQ-LIF-5": (
        "A verifier whose connection is LOST says HELLO again, with pauses that SHOULD grow from one attempt to the "
        "next. After REJECT it SHOULD NOT say the same HELLO again without a pause."
    ),
    "REQ-PFX-1": "fewer than 48 bytes: WRONG_SIZE;",
    "REQ-PFX-2": "another magic: BAD_MAGIC;",
    "REQ-PFX-3": "prefix crc: BAD_PREFIX_CRC. Nothing else of the prefix may be used then;",
    "REQ-PFX-4": "another major: BAD_VERSION. Another minor MUST be accepted;",
    "REQ-PFX-5": "an unregistered type: UNKNOWN_TYPE;",
    "REQ-PFX-6": "flags or reserved not zero: RESERVED_NOT_ZERO;",
    "REQ-PFX-7": (
        "control length 0 or above 4,096, body count above 32, body length above 64 MiB: LIMIT_EXCEEDED, before "
        "anything is allocated or decoded;"
    ),
    "REQ-PFX-8": "body length not a multiple of 64, or zero exactly when the body count is not: WRONG_SIZE.",
    "REQ-PFX-9": (
        "A frame whose key is stale or out of range MUST be dropped now, from the prefix alone (section 11). A slot "
        "that is not below the negotiated number is SLOT_OUT_OF_RANGE; of this a drafter tells the sender (section 12)."
    ),
    "REQ-PFX-10": (
        "A message without a key MUST be sent with *no key*. A message with one carries the slot, the slot's "
        "generation, and the round that it is about; 0 where it is about none (OPEN, CONTEXT, RESET, CANCEL, CLOSE). A "
        "verifier drops a message of the wrong sort as UNEXPECTED_MESSAGE; a drafter MAY overlook a key that a message "
        "should not have."
    ),
    "REQ-FRM-1": (
        "A frame's length MUST be align64(48 + control length) + body length; otherwise WRONG_SIZE. There is nothing "
        "after it."
    ),
    "REQ-FRM-2": (
        "Each body starts at a multiple of 64 from the frame's start and is followed by zeros to the next one."
    ),
    "REQ-FRM-3": "Every padding byte MUST be zero: BAD_PADDING.",
    "REQ-FRM-4": (
        "The number of descriptors in control MUST be the body count, and the sum of their align64(bytes) the body "
        "length: BAD_DESCRIPTOR."
    ),
    "REQ-FRM-5": (
        "After the prefix a receiver checks, in this order, whether the message is allowed in its state, the key, the "
        "frame's length, the crc of control, its form (NONCANONICAL), its fields (BAD_FIELD), the padding behind it, "
        "the number and sizes of its descriptors, their checksum kind, what the message's section says, and of each "
        "body the shape, the padding and the checksum. It stops at the first fault. A receiver MUST NOT use a part "
        "before the checks of the parts before it."
    ),
    "REQ-BOD-1": "A descriptor's shape MUST be the one that the message's other fields imply, exactly: BAD_DESCRIPTOR.",
    "REQ-BOD-2": "Its checksum kind MUST be the negotiated one: BAD_DESCRIPTOR.",
    "REQ-CRC-1": (
        "Prefix, control and row records are under CRC32C (Castagnoli, RFC 3720; `123456789` gives 0xE3069283)."
    ),
    "REQ-CRC-2": "Control MUST be checked before it is decoded: BAD_CONTROL_CRC.",
    "REQ-CRC-3": (
        "A body MUST be checked before it is used: BAD_BODY_CHECKSUM. Body and reply checksums are of the negotiated "
        "kind: XXH3-64 with seed 0, or CRC32C zero-extended; 8 bytes, little-endian, over the bytes without padding."
    ),
    "REQ-CRC-4": '"No checksum" does not exist.',
    "REQ-CAN-1": (
        "It MUST be the only encoding of its values: arrays, integers, byte strings (bin) and strings (str, valid "
        "UTF-8), each in its shortest form; no map, nil, bool, float, extension, or trailing byte. A receiver MUST "
        "refuse any other *form* with NONCANONICAL; decoding, encoding again and comparing is the simplest way. A "
        "*value* in the right form that the field does not allow is BAD_FIELD: a negative integer in its shortest form "
        "and a string that is not ASCII belong there, for the form is checked before any field is looked at."
    ),
    "REQ-CAN-2": (
        "Arrays nest at most three deep, the outer one included, and hold at most 128 values each: NONCANONICAL, before"
        " room is made for them."
    ),
    "REQ-CAN-3": (
        "Checksums, digests and hashes are byte strings of fixed length. Nothing that depends on a drafted value is in "
        "control, so that the length of a reply does not depend on what was drafted."
    ),
    "REQ-CAN-4": "The number of fields is fixed; each has a type and a range: BAD_FIELD.",
    "REQ-CAN-5": "Strings are printable ASCII (0x20 .. 0x7e) of at most 96 bytes: BAD_FIELD.",
    "REQ-HEL-1": "`compat hash` MUST be the SHA-256 of `compat`: BAD_FIELD.",
    "REQ-HEL-2": "The drafter MUST compare hashes first, and decode `compat` only when they differ.",
    "REQ-HEL-3": (
        "When they differ it MUST REJECT with INCOMPATIBLE, and name the first differing field and both values."
    ),
    "REQ-HEL-4": "The version MUST be one that both list: BAD_VERSION. Nobody upgrades or downgrades silently.",
    "REQ-HEL-15": (
        "A HELLO SHOULD list versions of one major only, that of its `compat`. The drafter MUST take the highest that "
        "both list, and compare `compat` with its own for that version; the version of ACCEPT holds until the next "
        "HELLO. A verifier MUST refuse an ACCEPT of a version that its HELLO does not list: BAD_VERSION."
    ),
    "REQ-HEL-16": (
        "A verifier MAY say HELLO with a lower version after REJECT BAD_VERSION, and MUST NOT unless it was told to."
    ),
    "REQ-HEL-5": "Unknown capability bits and unknown checksum bits of a HELLO MUST be ignored.",
    "REQ-HEL-6": (
        "Each capacity of ACCEPT MUST be the minimum of both sides'. A verifier MUST refuse an ACCEPT above its offer: "
        "BAD_NEGOTIATION."
    ),
    "REQ-HEL-7": (
        "`reply bytes` MUST be depth * (16 + 8 * support) for the capacities in the same message, or, where the message"
        " has the capability DENSE_ROWS, depth * (16 + the larger of 8 * support and 4 * vocabulary size); `tap row "
        "bytes` MUST be the number of tap layers * tap width * element size: BAD_NEGOTIATION. In version 1, see 7.9."
    ),
    "REQ-HEL-8": (
        "The checksum kind is XXH3-64 if both know it, else CRC32C if both do, else REJECT NO_COMMON_CHECKSUM."
    ),
    "REQ-HEL-9": 'Heartbeat and step deadline MUST be 1 to 600,000 ms. There is no "for ever".',
    "REQ-HEL-10": (
        "ACCEPT, REJECT and CHALLENGE MUST echo the HELLO's epoch and serial; one that does not echo the last HELLO is "
        "dropped as STALE_HELLO."
    ),
    "REQ-HEL-11": (
        "`auth` is empty on a side without a secret. A drafter without one MUST REJECT another value with "
        "AUTH_UNSUPPORTED, and a verifier without one MUST refuse an ACCEPT with another value: AUTH_UNSUPPORTED."
    ),
    "REQ-HEL-13": (
        "ACCEPT's capabilities MUST be those that the HELLO had and the drafter has too. A verifier MUST refuse an "
        "ACCEPT with a capability that it did not offer: BAD_NEGOTIATION."
    ),
    "REQ-HEL-14": (
        "A side whose vocabulary is so large that a ROW with one dense row is above the body limit MUST NOT offer "
        "DENSE_ROWS. Dense replies need depth * vocabulary size * 4 bytes for each round in flight: a side SHOULD offer"
        " them only when it was told to."
    ),
    "REQ-HEL-12": "A verifier SHOULD treat 10 s without an answer as loss of the connection.",
    "REQ-AUT-1": (
        "With a secret, a drafter MUST look at nothing of a HELLO but its `auth`, tell nothing of its own and allocate "
        "nothing, before the verifier has proven the secret. It answers an empty `auth` with REJECT AUTH_REQUIRED, a "
        "nonce alone with CHALLENGE, and anything else that is not the right proof with REJECT AUTH_FAILED, in constant"
        " text."
    ),
    "REQ-AUT-2": (
        "A proof is right only for the HELLO that got the CHALLENGE, byte for byte except for the proof itself."
    ),
    "REQ-AUT-3": (
        "Nonces are 32 random bytes, new for each HELLO and each CHALLENGE. A CHALLENGE serves for one proof, right or "
        "wrong, and is void after any other HELLO: a drafter holds at most one per connection."
    ),
    "REQ-AUT-4": (
        "A verifier with a secret MUST refuse an ACCEPT without a right proof (AUTH_FAILED), also where no CHALLENGE "
        "came before it, and before it uses anything else of it."
    ),
    "REQ-AUT-5": (
        "A verifier MUST answer at most one CHALLENGE for each HELLO. One without a secret, or that has answered, drops"
        " it as UNEXPECTED_MESSAGE."
    ),
    "REQ-AUT-6": "Proofs MUST be compared in a time that does not depend on where they differ. Refusals are counted.",
    "REQ-AUT-7": "A side MUST compute proofs as above; a label, a length or a part more or less makes another proof.",
    "REQ-OPN-1": "`seed` is the two's complement of a signed 64-bit integer.",
    "REQ-OPN-3": "The generation MUST be above every earlier one of the slot on this connection: STALE_GENERATION.",
    "REQ-OPN-5": "A draining drafter refuses with DRAINING.",
    "REQ-OPN-4": (
        "The lane MUST be in the negotiated mask (LANE_MISMATCH). Support MUST NOT be above the negotiated maximum, and"
        " MUST NOT be 0 (dense rows) without the capability DENSE_ROWS (SUPPORT_OUT_OF_RANGE)."
    ),
    "REQ-OPN-2": "The slot MUST be free: SLOT_BUSY, and the lease that holds it is unharmed.",
    "REQ-OPN-6": "Context starts empty at `context start`; `start digest` is the prefix digest before that position.",
    "REQ-CTX-3": "No round may be unresolved: ROUND_UNRESOLVED.",
    "REQ-CTX-2": "`first position` MUST be the context's end: CONTEXT_GAP, and the generation is dead.",
    "REQ-CTX-4": (
        "The rows of all CONTEXTs since ACCEPT MUST NOT exceed the granted credit: CREDIT_EXCEEDED. Credit is a total "
        "that only grows: it starts at `context credit rows` and is raised by PONG. Taps in STEP do not count."
    ),
    "REQ-CTX-7": (
        "A verifier MUST count with the highest credit limit that it has been told. A drafter refuses only what exceeds"
        " its window plus the rows that it has taken in; that may be more than it has announced, never less. It SHOULD "
        "announce (REQ-PNG-1) when a quarter of the window has come free."
    ),
    "REQ-CTX-6": (
        "A verifier counts the rows that it sends. A drafter MUST count those of a CONTEXT that it refuses after its "
        "control as taken in at once: their credit comes back with the next PONG. Credit of a CONTEXT that got lost, or"
        " was dropped from its prefix, comes back with the next HELLO and not before; a verifier that is left without "
        "credit for long MAY say HELLO."
    ),
    "REQ-CTX-1": (
        "TAPS are raw rows of the negotiated dtype; TOKENS are the token ids at the same positions. A drafter MUST NOT "
        "index anything by such an id before it has found it below the vocabulary size (TOKEN_OUT_OF_RANGE); for the "
        "digest (7.3) any value serves."
    ),
    "REQ-CTX-5": "A sender SHOULD keep frames near 1 MiB so that a heartbeat is never stuck behind a prompt.",
    "REQ-DIG-1": (
        "d_0 is 8 zero bytes; d_(i+1) = XXH3-64(d_i followed by token i as u32), 8 bytes little-endian. The digest in a"
        " STEP covers all positions before the anchor. XXH3-64 has seed 0, and it is used here whatever the checksum "
        "kind is."
    ),
    "REQ-DIG-2": (
        "A drafter that knows the tokens MUST check it: DIGEST_MISMATCH. It knows those of CONTEXT with TOKENS, "
        "anchors, accepted drafts of its own replies, and committed tokens. Where it does not, it adopts the declared "
        "digest."
    ),
    "REQ-STP-11": "A slot MUST NOT have two items: BAD_FIELD.",
    "REQ-STP-1": "With one item the prefix MUST carry its key.",
    "REQ-STP-2": "With several, the prefix carries no key. A faulty item MUST NOT hurt the others.",
    "REQ-STP-7": (
        "**Retry.** The identical STEP item again, taps included, MUST be answered with the identical reply bytes, or "
        "with nothing while the round is still being drafted. Nothing is redrawn. Identical means: every field equal, "
        "and the checksum of the taps. It need not come in the same batch. Only the last round of the generation is "
        "kept, until the next one."
    ),
    "REQ-STP-8": "The same key with other content MUST be refused: ROUND_KEY_REUSED.",
    "REQ-STP-3": (
        "The round MUST be above the last one of the generation (STALE_ROUND); gaps are allowed. A slot has at most one"
        " unresolved round: ROUND_UNRESOLVED."
    ),
    "REQ-STP-5": (
        "Depth MUST be 1 to the negotiated maximum (DEPTH_OUT_OF_RANGE; 0 is BAD_FIELD), the lane that of OPEN "
        "(LANE_MISMATCH), anchor and commit token below the vocabulary size (TOKEN_OUT_OF_RANGE)."
    ),
    "REQ-STP-4": (
        "`tap first` MUST be the context's end (CONTEXT_GAP), and the anchor position `tap first + tap rows` "
        "(ANCHOR_MISMATCH): after it the context covers exactly the positions before the anchor. After a round that "
        "accepted a drafts, the next STEP brings a + 1 rows: the old anchor's and the accepted drafts'."
    ),
    "REQ-STP-9": '`accepted count` 255 means "no commit"; any other value commits the last replied round (7.7).',
    "REQ-STP-6": "Depth MUST be chosen before anything of the proposal is drawn.",
    "REQ-STP-10": "`context version` names the verifier's processor, grammar and stop state; the drafter echoes it.",
    "REQ-ROW-11": "Depth, support and representation MUST be those of the STEP item and of OPEN: WRONG_SIZE.",
    "REQ-ROW-1": (
        "Row i is the law from which the token of row i was drawn, given the anchor and the tokens of rows 0 .. i - 1 "
        "of this reply (`dyadic24-standard-v1`): integer counts, total exactly 2^24, in a sparse row no zero count."
    ),
    "REQ-ROW-2": "Sizes depend on depth, support and vocabulary size only; padding entries are zero.",
    "REQ-ROW-3": (
        "The row crc covers the record without it (token, entries, confidence: bytes 0 .. 7 and 12 .. 15), then the "
        "row's ids, then its q: BAD_ROW_CRC. Ids and q with their padding entries."
    ),
    "REQ-ROW-4": (
        "`entries` MUST be 1 to support, or in a dense row the vocabulary size; the token below the vocabulary size; "
        "the confidence at most 2^24: BAD_ROW_RECORD."
    ),
    "REQ-ROW-5": "Rows that were received already are dropped as DUPLICATE; a gap is ROWS_MISSING.",
    "REQ-ROW-6": (
        "Greedy drafting, and the `match` and `greedy` lanes, send rows with one count, of 2^24: in a sparse row, one "
        "entry. Which of them OPEN asked for is said by its lane, not by its support."
    ),
    "REQ-ROW-7": (
        "A verifier MUST refuse, and MUST NOT repair, a row that is not dyadic: wrong sum, unsorted or duplicate ids, "
        "an id that is not below the vocabulary size, -0.0, not finite, not a multiple of 2^-24, zero count at the "
        "drafted token. This has no code on the wire; it is counted where it is found, and the round goes on without "
        "the drafter. The verifier MAY end the connection and take no more from that process."
    ),
    "REQ-ROW-8": (
        "The confidence of row i, in units of 2^-24, is the drafter's guess that draft i is accepted if the drafts "
        "before it are. It MUST be a function of what row i is conditioned on (REQ-ROW-1) and be fixed before token i "
        "is drawn: a verifier that stops a round at a low confidence stays exact only so. A drafter without an opinion "
        "sends 2^24."
    ),
    "REQ-ROW-9": (
        "A verifier MAY verify only the first rows of a proposal and drop the others; it commits as if they had been "
        "rejected. In the `ratio` lane, whether row i is verified MUST be decided from the confidences of rows 0 .. i "
        "and from what is independent of this reply's tokens: load, earlier rounds, and confidences of sessions with "
        "another seed."
    ),
    "REQ-ROW-10": (
        "A sender SHOULD keep the bodies of a ROW within 1 MiB, by sending several, so that a heartbeat is never stuck "
        "behind a reply. A receiver MUST take any division into ROWs."
    ),
    "REQ-CMP-4": (
        "Any status but 0 is an error code: the draft failed and the generation is dead on both sides. A verifier that "
        "does not know the code takes it for DRAFT_FAILED, and looks at nothing else of the message."
    ),
    "REQ-CMP-2": "Position, context version and digest MUST be those of the STEP: COMPLETION_MISMATCH.",
    "REQ-CMP-1": (
        "With status 0, row count MUST be the depth and all rows present (ROWS_MISSING), reply bytes exactly depth * "
        "(16 + 8 * support), of dense rows depth * (16 + 4 * vocabulary size) (WRONG_SIZE), and the reply checksum that"
        " of RECORDS, IDS and Q of the whole reply one after the other without padding (BAD_REPLY_CHECKSUM)."
    ),
    "REQ-CMP-3": (
        "No row may be consumed before the whole reply has been validated. A fault discards the whole proposal on all "
        "ranks."
    ),
    "REQ-CMP-5": (
        "The draft time is the worker's own (context rows, backbone, sampling; no link). It is for measuring only and "
        "MUST NOT decide anything about the proposal."
    ),
    "REQ-CMT-4": "An identical repetition is dropped as DUPLICATE.",
    "REQ-CMT-1": (
        "It reports the slot's last replied round, once; accepted count is at most its depth; `token` is the correction"
        " or bonus and stands at anchor position + accepted count + 1. COMMIT_MISMATCH otherwise. The message form MUST"
        " name the last round (STALE_ROUND) and a token below the vocabulary size (TOKEN_OUT_OF_RANGE)."
    ),
    "REQ-CMT-2": "The digest of the message form covers all positions before `position`.",
    "REQ-CMT-3": (
        "In a STEP, the new anchor MUST be that token, or stand after it (rounds without the drafter came between)."
    ),
    "REQ-CMT-5": (
        "A round that was discarded, timed out or never replied is not committed. A verifier commits each other round "
        "at most once; it need not, and sends 255 in the next STEP then."
    ),
    "REQ-RST-1": (
        "RESET, CANCEL and CLOSE are valid in every state of a slot but FREE (SLOT_NOT_OPEN), also while a round is "
        "unresolved. A reply of the old generation that is under way MUST NOT be sent any more."
    ),
    "REQ-ONE-1": (
        "`compat` has wire major 1 and in `lanes` the greedy lane alone; `reply bytes` is depth * 16; capabilities are "
        "ignored in HELLO and 0 in ACCEPT."
    ),
    "REQ-ONE-2": (
        "OPEN MUST have the lane `greedy` and draft temperature 0 (LANE_MISMATCH), and support 1 "
        "(SUPPORT_OUT_OF_RANGE). A verifier serves every other request from the target alone."
    ),
    "REQ-ONE-3": (
        "A ROW has support 1, representation 3 (TOKENS) and the body RECORDS alone. Each row stands for one entry, the "
        "record's token with a count of 2^24: `entries` MUST be 1, and ids and q take no bytes, in the row crc and in "
        "the reply checksum neither. COMPLETION's reply bytes are depth * 16."
    ),
    "REQ-ONE-4": "Representation 3 MUST NOT be sent in version 2, nor another one in version 1: WRONG_SIZE.",
    "REQ-PNG-1": (
        "PING MUST be answered at once with its nonce, in both directions; nonce 0 is a PONG that only raises credit. A"
        " credit limit below one that was told earlier changes nothing."
    ),
    "REQ-PNG-2": (
        "A verifier SHOULD send PING each heartbeat interval, a drafter MAY; neither may infer life from the transport,"
        " for a stopped process closes nothing. Three intervals after the first PING since any usable frame, without "
        "another one, the drafter is PEER_SILENT for a verifier; a drafter MUST free a verifier's slots after 60 "
        "intervals without any usable frame."
    ),
    "REQ-DRN-1": (
        "After DRAIN a drafter refuses OPEN and answers everything else until the deadline. It MAY send DRAIN again. A "
        "verifier MUST NOT send OPEN after it, and SHOULD close its sessions before the deadline."
    ),
    "REQ-STA-1": (
        "A request has `is report` 0 and is answered with a report. After all sessions are closed every figure but the "
        "counters MUST be zero. A verifier answers no request."
    ),
    "REQ-EPO-1": "A message whose epoch is not the peer's accepted epoch MUST be dropped: WRONG_EPOCH.",
    "REQ-LAN-1": "The counts that travel *are* q; nobody recomputes or renormalises them.",
    "REQ-LAN-2": "A request is in one lane for a whole round; on the wire, for a whole session.",
    "REQ-RNG-1": (
        "The generation field is the number of generations since OPEN (key generation minus the generation of OPEN) "
        "modulo 2^24, so that a seed gives the same draws in every slot."
    ),
    "REQ-RNG-2": "The drafter draws in the proposal domain only; the verifier in all others.",
    "REQ-RNG-4": (
        "In the `ratio` lane a drafter MUST draw each token from the counts of its row in this way. A row of one entry "
        "needs no draw."
    ),
    "REQ-RNG-3": (
        "Nothing is drawn twice under one key. A retry resends bytes; anything else needs a new round or generation."
    ),
    "REQ-GEN-1": (
        "The verifier numbers generations; they only grow for as long as its process lives, across reconnects too. The "
        "first is at least 1. One above 2^63 - 1 is GENERATION_EXHAUSTED."
    ),
    "REQ-GEN-2": (
        "A frame with another generation than the slot's current one (or, for OPEN, RESET, CANCEL and CLOSE, one not "
        "above it) MUST be dropped: STALE_GENERATION. A reply to another round than the one in flight: STALE_ROUND, or "
        "DUPLICATE when that round has ended, or LATE when it timed out. A frame for a FREE slot is SLOT_NOT_OPEN, one "
        "of another session than the slot's is WRONG_SESSION, and one for a DORMANT slot, RESET, CANCEL and CLOSE "
        "apart, SLOT_NEEDS_RESET."
    ),
    "REQ-GEN-3": (
        "RESET starts a generation with an empty context. Every q row, Markov state, KV row, grammar state and cached "
        "reply of the old one is dead."
    ),
    "REQ-GEN-4": (
        "When a step deadline passes, the verifier MUST bump the generation *before* the round's staging can be leased "
        "again. Then it needs RESET or CLOSE."
    ),
    "REQ-GEN-5": "CANCEL kills the generation and leaves the slot DORMANT until RESET or CLOSE.",
    "REQ-GEN-6": "CLOSE frees the slot.",
    "REQ-GEN-7": (
        "A verifier whose generation failed takes a new one for RESET or CLOSE; a drafter stays at the failed one until"
        " that comes."
    ),
    "REQ-STG-1": "Reply staging is allocated once, at ACCEPT: max in flight blocks (at least two) of `reply bytes`.",
    "REQ-STG-2": (
        "A block is leased by a key before the STEP is sent, and is free again only when every consumer has released "
        "it."
    ),
    "REQ-STG-3": (
        "Where a transport writes into staging itself, a dead round's block MUST stay quarantined until the transport "
        "has confirmed that its operation is cancelled."
    ),
    "REQ-ERR-1": "Every drop and refusal MUST be counted under its code.",
    "REQ-ERR-2": (
        "A drafter that cannot use a frame of a live slot MUST send ERROR with that key and scope SLOT or wider, and "
        "fail the slot; a message that the sender has outrun (STALE_GENERATION, STALE_ROUND, SLOT_NOT_OPEN, "
        "WRONG_SESSION, SLOT_NEEDS_RESET, DUPLICATE) is only counted. A frame without a usable key is only counted. The"
        " scope is the code's, raised to SLOT where it is narrower; with a wider one the slot that holds the key is "
        "left alone."
    ),
    "REQ-ERR-3": "`where` is constant text, never received bytes. ERROR is never answered with ERROR.",
    "REQ-ERR-4": (
        "A verifier ends what the scope says if the key's generation is current, and otherwise drops the message. "
        "Without a key it heeds scope CONNECTION alone. A drafter counts an ERROR and ends nothing."
    ),
    "REQ-ERR-5": "No received byte may end the process, the connection's thread, or another slot's round.",
    "REQ-ERR-6": (
        "A verifier that cannot use a reply frame of the round in flight MUST discard the whole round, except for "
        "WRONG_EPOCH, WRONG_SESSION and DUPLICATE, which drop the frame alone. It tells the drafter nothing; the slot "
        "goes on with a higher round, and without a commit of this one."
    ),
    "REQ-ERR-7": "A peer that gets a registered code which it does not expect goes by the message's scope.",
    "REQ-LIM-1": (
        "A limit MUST be checked before anything is allocated, copied or indexed by the value that it bounds, after "
        "authentication too."
    ),
    "REQ-TRN-1": (
        "A transport delivers whole frames, in order per sender, or not at all; it MUST NOT queue for an absent peer "
        "without bound."
    ),
    "REQ-TRN-2": "It MUST NOT fall back to another transport unless the configuration says so.",
    "REQ-TRN-3": (
        "A received frame MUST stay unchanged until the receiver asks its transport for more; a receiver that needs it "
        "longer copies it."
    ),
    "REQ-TRN-4": "Queues, connections and receive memory MUST be bounded; a full queue is an absent peer.",
    "REQ-ZMQ-1": (
        "Set explicitly: LINGER 0, send and receive high-water marks, MAXMSGSIZE to the largest frame, HANDSHAKE_IVL, "
        "heartbeats, ROUTER_HANDOVER 0, ROUTER_MANDATORY 1, IMMEDIATE 1."
    ),
    "REQ-ZMQ-2": "A routing id is one connection: the drafter keeps one protocol state for each.",
    "REQ-ZMQ-3": (
        "With CURVE (RFC 26) a drafter admits the public keys of its list and no others (ZAP, RFC 27), and a verifier "
        "knows its drafter's public key."
    ),
    "REQ-TCP-1": (
        "A receiver MUST check the whole prefix (4.1) before it sizes anything by it, and SHOULD let memory follow the "
        "bytes that have arrived rather than the announced length."
    ),
    "REQ-TCP-2": (
        "After a prefix that fails, or a frame above the receiver's limit, it MUST close the connection and MUST NOT "
        "read on: there is no way to find the next frame. Frames before it count."
    ),
    "REQ-TCP-3": (
        "The end of the stream, in either direction, ends the connection. A frame that the end cuts is dropped."
    ),
    "REQ-TCP-4": "TCP_NODELAY is set. A connection without a whole frame after 5 s SHOULD be closed.",
    "REQ-TCP-5": (
        "A verifier that lost its connection connects again with growing pauses; only a received frame resets them."
    ),
    "REQ-TLS-1": (
        "TLS 1.3 only. Both ends MUST present a certificate of the configured CA; the verifier MUST check that the "
        "drafter's certificate names the host of the endpoint. No resumption."
    ),
    "REQ-UCX-1": (
        "Tags are random, and new for every connection, so that a late frame of an old one matches nothing. A message "
        "of an unknown tag is received and thrown away."
    ),
    "REQ-UCX-2": (
        "The end of the socket, or a failed endpoint, ends the connection. Endpoints MUST use peer failure handling."
    ),
    "REQ-UCX-3": (
        "A transfer that is given up MUST be cancelled, and its buffer used again only after its completion; else "
        "never."
    ),
    "REQ-UCX-4": "The UCX transports are named by the configuration (`UCX_TLS`); unset, nothing starts.",
    "REQ-UCX-5": (
        "An introduction of another size, magic or address length, or with a byte behind the address that is not zero, "
        "ends the connection. So does a message whose lengths do not add up to its own, whose padding is not zero, "
        "or with a frame above the limit."
    ),
    "REQ-SEC-1": "Received bytes are data: no pickle, no code, no template, no type named by the peer.",
    "REQ-SEC-2": (
        "Listen on loopback by default. Another interface MUST be asked for explicitly, and needs a secret (6.1), CURVE"
        " or mutual TLS."
    ),
    "REQ-SEC-6": (
        "A secret or key MUST come from a file that only its owner can read, never from arguments or the environment, "
        "and never into a log. An empty one is an error."
    ),
    "REQ-SEC-7": (
        "The proofs of 6.1 cover HELLO and ACCEPT. Whatever follows, REJECT and CHALLENGE are neither authenticated nor"
        " encrypted at this layer: checksums keep nobody from changing frames on the way. Where that matters use TLS or"
        " CURVE, or an isolated network."
    ),
    "REQ-SEC-3": (
        "A peer can waste at most the negotiated slots, staging and credit. Sparse ids index nothing before their range"
        " has been checked."
    ),
    "REQ-SEC-4": "Padding is zero and checked, so that frames carry no left-over memory.",
    "REQ-SEC-5": (
        "The length and the timing of an admission decision MUST NOT depend on drafted values: frames have constant "
        "size, and a refusal for content is an incident, not a routine path."
    ),
    "REQ-VER-1": (
        "A peer MUST answer an unknown *type* with a counted drop, and MUST refuse an unknown *id* in a known field "
        "with BAD_FIELD."
    ),
    "REQ-VER-2": (
        "A connection has one version from ACCEPT to its end. Which versions a side speaks is configuration, 2.0 alone "
        "unless it says otherwise; a v1 peer is never upgraded, and no peer is taken for v1 because it failed."
    ),
}
