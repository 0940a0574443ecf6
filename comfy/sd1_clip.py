"""Text encoding, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.public import write_through
from comfy.text_encoders.embeddings import (
    expand_directory_list,
    load_embed,
    safe_load_embed_zip,
)
from comfy.text_encoders.encoder import (
    ClipTokenWeightEncoder,
    SD1ClipModel,
    SDClipModel,
    gen_empty_tokens,
)
from comfy.text_encoders.prompt_weights import (
    escape_important,
    parse_parentheses,
    token_weights,
    unescape_important,
)
from comfy.text_encoders.tokenizer import SD1Tokenizer, SDTokenizer

write_through(__name__)
