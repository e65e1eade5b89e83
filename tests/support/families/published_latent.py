"""What the configs of published models with latent attention say (2024 to 2026)."""

from __future__ import annotations

from tests.support.families.published import published, spec_of

V2_LITE = published("DeepSeek-V2-Lite")
V2_CHAT = published("DeepSeek-V2-Chat")
V3 = published("DeepSeek-V3")
KIMI_K2 = published("Kimi-K2-Instruct")
GLM_FLASH = published("GLM-4.7-Flash")
MISTRAL_SMALL_4 = published("Mistral-Small-4-119B-2603")

__all__ = ["GLM_FLASH", "KIMI_K2", "MISTRAL_SMALL_4", "V2_CHAT", "V2_LITE", "V3", "spec_of"]
