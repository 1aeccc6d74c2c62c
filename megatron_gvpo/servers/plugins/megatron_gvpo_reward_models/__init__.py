"""SGLang's models for reward models, corrected: `SGLANG_EXTERNAL_MODEL_PACKAGE=megatron_gvpo_reward_models`.

SGLang uses the models of this package instead of its own models with the same names.
"""
