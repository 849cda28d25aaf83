"""Content addresses of KV blocks.

A full block is named by a hash of its tokens and of everything before it:

    name[i] = blake2b(name[i-1] | int32 tokens of block i, 16 bytes),  name[-1] = blake2b(salt)

Two requests whose prompts share a prefix therefore share names, block by block. blake2b rather than
a faster non-cryptographic hash because a forged collision would let one user read the effect of
another user's prompt.
"""

from hashlib import blake2b

NAME_BYTES = 16
INT32_BYTES = 4


def root_name(salt: str = "") -> bytes:
    """The parent of a request's first block. Different salts never share blocks."""
    return blake2b(salt.encode(), digest_size=NAME_BYTES).digest()


def extend_names(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Names of the full blocks in `token_ids` (int32, little-endian) that follow block `parent`."""
    stride = block_size * INT32_BYTES
    names = []
    for start in range(0, len(token_ids) - stride + 1, stride):
        parent = blake2b(
            parent + token_ids[start : start + stride], digest_size=NAME_BYTES
        ).digest()
        names.append(parent)
    return names


def block_names(token_ids: bytes, block_size: int, salt: str = "") -> bytes:
    """All full blocks' names of a prompt, joined (16 bytes each), as sent in `AddRequest`."""
    return b"".join(extend_names(root_name(salt), token_ids, block_size))
