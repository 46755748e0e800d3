"""Secrets of many kinds in the shapes in which command lines, environments and configurations hold them.

Each has the form that its issuer documents; letters are drawn at random, with a seed. None opens anything.
"""

import base64
import json
import random
import string
from dataclasses import dataclass

BASE62 = string.ascii_letters + string.digits
LOWER = string.ascii_lowercase + string.digits
UPPER = string.ascii_uppercase + string.digits
HEX = "0123456789abcdef"
URL_SAFE = BASE62 + "-_"


@dataclass(frozen=True)
class Planted:
    """A secret of a kind, and the value of JSON that holds it: arguments, an object or a text."""

    kind: str
    value: object
    secret: str


def planted(seed: int = 47) -> list[Planted]:
    """100 secrets or more, of 40 kinds or more."""
    draw = random.Random(seed)

    def letters(alphabet: str, count: int) -> str:
        return (
            "".join(draw.choice(alphabet) for _ in range(count - 3)) + "aZ7"[:3]
            if alphabet in (BASE62, URL_SAFE)
            else "".join(draw.choice(alphabet) for _ in range(count - 1)) + "7"
        )

    def word() -> str:
        """A password that only its name gives away."""
        return letters(LOWER, 9)

    plants: list[Planted] = []

    def add(kind: str, value: object, secret: str) -> None:
        plants.append(Planted(kind, value, secret))

    # By form, in places without a name that announces them.
    forms = {
        "Hugging Face": "hf_" + letters(BASE62, 34),
        "GitHub": "ghp_" + letters(BASE62, 36),
        "GitHub server": "ghs_" + letters(BASE62, 36),
        "GitHub fine-grained": "github_pat_" + letters(BASE62, 22) + "_" + letters(BASE62, 59),
        "GitLab": "glpat-" + letters(URL_SAFE, 20),
        "GitLab runner": "glrt-" + letters(URL_SAFE, 20),
        "OpenAI": "sk-proj-" + letters(URL_SAFE, 60),
        "Anthropic": "sk-ant-api03-" + letters(URL_SAFE, 93) + "AA",
        "Slack": "xoxb-" + letters(string.digits, 12) + "-" + letters(string.digits, 12) + "-" + letters(BASE62, 24),
        "Slack app": "xapp-1-A" + letters(UPPER, 10) + "-" + letters(string.digits, 12) + "-" + letters(HEX, 64),
        "AWS key id": "AKIA" + letters("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 16),
        "AWS session": "ASIA" + letters("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 16),
        "Google": "AIza" + letters(URL_SAFE, 35),
        "Google OAuth": "ya29." + letters(URL_SAFE, 60),
        "Google client": "GOCSPX-" + letters(URL_SAFE, 28),
        "npm": "npm_" + letters(BASE62, 36),
        "PyPI": "pypi-AgEIcHlwaS5vcmc" + letters(URL_SAFE, 80),
        "Stripe": "sk_live_" + letters(BASE62, 24),
        "Stripe restricted": "rk_live_" + letters(BASE62, 24),
        "SendGrid": "SG." + letters(URL_SAFE, 22) + "." + letters(URL_SAFE, 43),
        "Twilio": "SK" + letters(HEX, 32),
        "Mailchimp": letters(HEX, 32) + "-us12",
        "Telegram": letters(string.digits, 9) + ":AA" + letters(URL_SAFE, 33),
        "Discord": "M" + letters(URL_SAFE, 24) + "." + letters(URL_SAFE, 6) + "." + letters(URL_SAFE, 27),
        "Databricks": "dapi" + letters(HEX, 32),
        "DigitalOcean": "dop_v1_" + letters(HEX, 64),
        "Docker": "dckr_pat_" + letters(URL_SAFE, 27),
        "Grafana": "glsa_" + letters(BASE62, 32) + "_" + letters(HEX, 8),
        "Vault": "hvs." + letters(URL_SAFE, 90),
        "NVIDIA": "nvapi-" + letters(URL_SAFE, 64),
        "Groq": "gsk_" + letters(BASE62, 52),
        "Replicate": "r8_" + letters(BASE62, 37),
        "Linear": "lin_api_" + letters(BASE62, 40),
        "Postman": "PMAK-" + letters(HEX, 24) + "-" + letters(HEX, 34),
        "Shopify": "shpat_" + letters(HEX, 32),
        "Atlassian": "ATATT3" + letters(URL_SAFE, 186),
        "Alibaba": "LTAI" + letters(BASE62, 20),
        "Azure client": letters(BASE62, 3) + "8Q~" + letters(BASE62, 34),
        "Artifactory": "AKCp" + letters(BASE62, 69),
        "Terraform": letters(BASE62, 14) + ".atlasv1." + letters(BASE62, 64),
        "Supabase": "sbp_" + letters(HEX, 40),
        "Dropbox": "sl.B" + letters(URL_SAFE, 130),
        "Asana": "1/" + letters(string.digits, 16) + ":" + letters(HEX, 32),
        "Lambda": "secret_lambda_" + letters(HEX, 32) + "." + letters(BASE62, 32),
        "RunPod": "rpa_" + letters(string.digits + string.ascii_uppercase, 44),
        "Kaggle": "KGAT_" + letters(HEX, 32),
        "Doppler": "dp.pt." + letters(BASE62, 43),
        "Pinecone": "pcsk_" + letters(BASE62, 6) + "_" + letters(BASE62, 63),
        "Buildkite": "bkua_" + letters(HEX, 40),
        "Snyk": "snyk_uat." + letters(HEX, 8) + "." + letters(BASE62, 60),
        "Discord user": "mfa." + letters(URL_SAFE, 84),
        "Flutterwave": "FLWSECK_TEST-" + letters(HEX, 32) + "-X",
        "Airtable": "pat" + letters(BASE62, 14) + "." + letters(HEX, 64),
        "JSON web token": ".".join(
            base64.urlsafe_b64encode(part).decode().rstrip("=")
            for part in (b'{"alg":"HS256"}', json.dumps({"sub": word()}).encode(), letters(BASE62, 32).encode())
        ),
    }
    for number, (kind, secret) in enumerate(forms.items()):
        shapes = (
            ["train.py", "--run", secret],
            {"note": f"copied from {secret}, see chat"},
            f"model.py(12): load ({secret})",
            {"LS_COLORS": "x", "MISC": secret},
        )
        add(kind, shapes[number % len(shapes)], secret)
    # By randomness.
    for shape in ("{}", "run {}", "s3://bucket/x?q={}"):
        secret = "".join(draw.choice(BASE62) for _ in range(40))
        add("random text", [shape.format(secret)], secret)
    # By name: in objects and environments.
    names = (
        "apiKey", "secretAccessKey", "MYSQL_PWD", "DB_PASS", "auth", "passphrase", "signature", "HF_TOKEN",
        "WANDB_API_KEY", "db_password", "AWS_SECRET_ACCESS_KEY", "client-secret", "PGPASSWORD", "sshpass", "cookie",
        "private_key", "encryptionKey", "jwt", "oauth_token", "SMTP_PASSWD", "dockerconfigjson", "PASSWORT",
        "sessionid", "xsrf", "bindpw", "passkey", "pwhash", "WIFI_PSK", "token_value", "pin_code", "kennwort",
        "contraseña", "mot_de_passe", "vault_secret_id", "access-code",
    )  # fmt: skip
    for number, name in enumerate(names):
        secret = word()
        shapes = (
            {name: secret},
            {"env": {"PATH": "/bin", name: f"{secret} {secret}"}},
            [f"{name}={secret}"],
            {"args": {name: [secret]}},
            {"containers": [{"env": [{"name": name, "value": secret}]}]},
        )
        add(f"name {name}", shapes[number % len(shapes)], secret)
    # By flag: in lists of arguments, and in one text.
    for number, flag in enumerate(("--pass", "--db-pass", "--api-key", "--auth-token", "-password", "--secret")):
        secret = word()
        shapes = (
            ["train.py", flag, secret, "--lr", "1"],
            f"python train.py {flag} {secret} --lr 1",
            [f"{flag}={secret}"],
        )
        add(f"flag {flag}", shapes[number % len(shapes)], secret)
        secret = word()
        add(f"flag {flag}", ["train.py", flag, secret], secret)
    for flag in ("--login", "-u", "--user"):
        secret = word()
        add("login", ["curl", flag, f"carol:{secret}"], secret)
    # Text, headers, addresses.
    texts = {
        "header": "Authorization: token {}",
        "header bearer": "curl -H 'Authorization: Bearer {}' https://h/x",
        "header key": "X-Api-Key: {}",
        "cookie": "Cookie: theme=dark; session={}",
        "two words": "db.password=two {}",
        "hydra": "++trainer.logger.token={}",
        "dotenv": "PATH=/bin\nDB_PASS={}\nLANG=C",
        "python": "Config(user='x', password='{}', lr=1)",
        "yaml": "password: {}",
        "xml": "<password>{}</password>",
        "sql": "CREATE USER x IDENTIFIED BY '{}'",
        "query": "https://h:8080/x?a=1&token={}&step=1",
        "signed URL": "https://h/x?X-Amz-Signature={}&b=2",
        "URL with password": "postgres://bob:{}@host/db",
        "URL with slash": "postgres://bob:pa/{}@host/db",
        "URL with token": "https://{}@git.example.com/team/llm.git",
        "remote": "origin\thttps://oauth2:{}@gitlab.example.com/team/llm.git (fetch)",
        "proxy": "proxyuser:{}@proxy:3128",
        "Slack webhook": "https://hooks.slack.com/services/T0ABCDEF1/B0ABCDEF2/{}",
        "Discord webhook": "https://discord.com/api/webhooks/1234567890/{}",
        "Teams webhook": "https://x.webhook.office.com/webhookb2/{}",
        "bot URL": "https://api.telegram.org/bot12345:{}/sendMessage",
        "Azure storage": "DefaultEndpointsProtocol=https;AccountName=x;AccountKey={}==;EndpointSuffix=y",
        "login command": "wandb login {}",
        "PEM block": "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
        "jdbc of Oracle": "jdbc:oracle:thin:scott/{}@h:1521",
        "netrc": "machine github.com login me password {}",
        "joined flag": "mysql -u root -p{} db",
        "docker login": "docker login -u me -p {} registry",
        "zip": "zip -P {} a.zip b",
        "redis": "redis-cli -a {} ping",
        "value of a flag": "kubectl create secret generic x --from-literal=password={}",
        "object": "Config(secret_key=SecretStr('{}'))",
        "percent": "api_key%3D{}",
        "Mattermost webhook": "https://chat.corp/hooks/{}",
        "PagerDuty": "https://events.pagerduty.com/integration/{}/enqueue",
        "ping": "https://hc-ping.com/{}",
        "digest": 'Authorization: Digest username="u", response="{}"',
        "attribute": '<add key="Password" value="{}"/>',
        "fish": "set -x DB_PASSWORD {}",
        "csh": "setenv DB_PASSWORD {}",
        "sentence": "password is {}",
        "sentence of a key": "the api key is {}",
        "sentence of a login": "INFO: using password {} for bob",
        "sentence of a file": "passphrase for key '/x': {}",
        "pair": "credentials: admin/{}",
        "YAML block": "token: !vault |\n  {}\n",
        "YAML list": "- name: DB_PASSWORD\n  value: {}\n",
        "redis setting": "requirepass {}",
        "aws": "aws configure set aws_secret_access_key {}",
        "openssl": "openssl enc -k {}",
        "minio": "mc alias set m http://h user {}",
        "path": "/data/token={}/part-0.bin",
        "JSON in text": '{{"db": {{"password": "{}"}}}}',
        "escaped JSON": '--config={{\\"password\\": \\"{}\\"}}',
        "JSON twice": json.dumps(json.dumps({"outer": json.dumps({"api_key": "@"})})).replace("@", "{}").replace(
            "{\\", "{{\\").replace("}\\", "}}\\").replace("{{}}", "{}"),
    }  # fmt: skip
    for kind, text in texts.items():
        secret = letters(LOWER, 24) if kind in ("login command", "Azure storage") else word()
        value = text.replace("{{", "{").replace("}}", "}").replace("{}", secret)
        add(kind, {"command": ["x", value]}, secret)
    return plants


HARMLESS: tuple[object, ...] = (
    # Hashes, identifiers, times.
    "0123456789abcdef0123456789abcdef01234567",
    "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "d41d8cd98f00b204e9800998ecf8427e",
    "GPU-8f1c2b3a-1d2e-4f5a-9b8c-7d6e5f4a3b2c",
    "MIG-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2",
    "c7gk4q2mzy5ejl3xk7h2v6w4aeo5u3n6bq2xw7y4r5t6z3a2b4c5",
    "2026-11-28T21:07:29.123456Z",
    "20261128_210729",
    "1764364049123456789",
    "run-20261128_210729-3k9x2m1p",
    "fsdp2-2026-01-02-a-long-name-with-numbers-in-it-42",
    "550e8400-e29b-41d4-a716-446655440000",
    "nvcr.io/nvidia/pytorch:25.01-py3@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "0x7f3a5c001000",
    # Kernels.
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEvi",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >",
    "void cub::DeviceRadixSortOnesweepKernel<Policy, false, long, int>(K*) [with Key = unsigned long; V = int]",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
    "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8",
    "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1_g1",
    "Cijk_Ailk_Bljk_HHS_BH_Bias_HAS_SAV_UserArgs_MT128x128x32_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1_ASEM1_CLR1",
    "triton_poi_fused__to_copy_add_mul_0d1d2d3de",
    "triton_red_fused_native_layer_norm_native_layer_norm_backward_12",
    "SubTensorOpWithCastTensor1d",
    "fw_tr_1C11_kernel_NCHW",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    "flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>",
    "multi_tensor_apply_kernel<TensorListMetadata<2>, AdamFunctor<float>>",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT",
    "set -x LD_LIBRARY_PATH /usr/lib",
    "login node gpu01 -p 8 started",
    "https://github.com/meta/llm/tree/integration/x7",
    "zip(strict=True) -Pooling2d",
    "dp.rank.3.tp.1.pp.0",
    "SecretStreamKernel('fwd', 3)",
    '<param name="hidden" value="4096"/>',
    "path3D=/data/x",
    "sl.Block.attention.forward",
    # Operators, modules, frames.
    "aten::scaled_dot_product_attention(Tensor query, Tensor key, Tensor value)",
    "nn.Module: TokenEmbedding_0",
    "autograd::engine::evaluate_function: ScaledDotProductFlashAttentionBackward0",
    "torch/nn/modules/module.py(1739): _wrapped_call_impl",
    "megatron/core/transformer/moe/token_dispatcher.py(312): token_permutation",
    "transformers/tokenization_utils_base.py(88): pad_token",
    "model.layers.17.self_attn.key_proj.weight",
    "ProfilerStep#12",
    "key_value",
    "token_values",
    "each step is 12ms, using token 0x1f2e3d",
    "name: gemm value: 128x128",
    "experts with token layout32 at step12",
    "skopeo -p 8",
    "FSDP::all_gather (layers.3.feed_forward)",
    "## Call CompiledFxGraph fmqzxvk3a2l7cp5jtq6htzvdx3u2dnrmi7oxuwtzgvcyhpdhm2ql ##",
    "Torch-Compiled Region: 0/0",
    "sort_by_key",
    # Settings.
    "--max-tokens=12",
    "tokens_per_second=3",
    "--tokenizer=llama",
    "key_value_heads: 8",
    "monkey=1",
    "bypass=yes",
    "compass: north",
    "google-auth==2.40.3",
    "PyJWT==2.3.0",
    "torch==2.13.0+cpu",
    "https://host:8080/path?step=3",
    "/data/0123456789abcdef0123456789abcdef01/part-0.bin",
    "meta-llama/Llama-3.1-8B-Instruct",
    "DeepSeek-R1-Distill-Qwen-32B-GPTQ-Int4-W8A8KV8",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    {"eos_token": "</s>", "pad_token_id": 0, "token_type": "word", "num_tokens": 4096},
    {"key_dim": 64, "sort_key": "loss", "cache_key": "a1", "attention_key_bias": False},
    {"optimizer": "AdamW", "lr": 0.1, "betas": [0.9, 0.95]},
    {"token": None, "use_auth": True, "key": 3},
    {"password": "", "api_key": "${API_KEY}", "secret": None},
    ["--use-auth-token", "--epochs", "3"],
    ["torchrun", "--nproc-per-node", "8", "train.py", "--passes", "3"],
    {"NCCL_VERSION": "2.21.5-1", "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "8"},
)
