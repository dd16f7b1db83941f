"""Recommended flags of the training commands on the embedded demo, with the names of its files. They are read before torch is imported."""

# Recommended flags of train_sft on this demo. The loss falls from 5.6 to about 0.7. After 200 to 300 steps, the model
# sorts half of the held-out lists.
SFT_DEFAULTS: dict = {
    "learning_rate": 2e-3,
    "lr_scheduler": "constant",
    "train_batch_size": 32,
    "micro_train_batch_size": 16,
    "max_steps": 60,
    "max_len": 128,
    "eval_steps": 20,
    "apply_chat_template": True,
    "pretrain": "model",
    "dataset": "sft.jsonl",
    "eval_dataset": "sft_eval.jsonl",
}

# Recommended flags of train_rm and train_dpo. They rank most held-out pairs right: see test_preference_demo.
RM_DEFAULTS: dict = {
    "learning_rate": 5e-4,
    "lr_scheduler": "constant",
    "train_batch_size": 32,
    "micro_train_batch_size": 16,
    "max_steps": 150,
    "max_len": 128,
    "eval_steps": 50,
    "apply_chat_template": True,
    "pretrain": "model",
    "dataset": "pairs.jsonl",
    "eval_dataset": "pairs_eval.jsonl",
}
DPO_DEFAULTS: dict = {**RM_DEFAULTS, "learning_rate": 1e-3, "beta": 0.1}

# Recommended flags of train_ppo. It needs a model that sometimes answers right after train_sft:
# --pretrain runs/.../model.
PPO_DEFAULTS: dict = {
    "advantage_estimator": "group_norm",
    "reward_func": "exact_match",
    "label_key": "label",
    "rollout_batch_size": 16,
    "n_samples_per_prompt": 8,
    "micro_rollout_batch_size": 64,
    "train_batch_size": 128,
    "micro_train_batch_size": 64,
    "prompt_max_len": 96,
    "generate_max_len": 32,
    "learning_rate": 2e-4,
    "critic_learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "max_steps": 40,
    "eval_steps": 10,
    "pretrain": "model",
    "dataset": "prompts.jsonl",
    "eval_dataset": "prompts_eval.jsonl",
}
