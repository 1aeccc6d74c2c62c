"""Model classes for reward models that SGLang uses in place of its own classes with the same names.

They correct errors of SGLang's. `SGLANG_EXTERNAL_MODEL_PACKAGE=megatron_gvpo_reward_models` selects them.
"""
