"""Secrets in JSON and in text: what the recorder redacts and `tracekit scrub` removes, by one list.

A secret is recognized by the name that it stands under, by its form, or by its randomness. Names and forms are those
that the public rules of secret scanners (gitleaks, detect-secrets) agree on. What none of the three shows cannot be
known: a password that is a plain word without a name, a key that looks like the hash of a commit.

The patterns run on each distinct string of a text once: traces repeat few strings millions of times.
"""

import bisect
import itertools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator

REDACTED = "[redacted]"

# Names ---------------------------------------------------------------------------------------------------------------
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = frozenset((
    "auth", "authorization", "bearer", "cookie", "cookies", "cred", "credential", "credentials", "creds",
    "dockerconfigjson", "dsn", "htpasswd", "jwt", "key", "keys", "netrc", "oauth", "otp", "pass",
    "passcode", "passkey", "passphrase", "passwd", "password", "passwords", "passwort", "pat", "psk", "psw", "pswd",
    "pw", "pwd", "pwhash", "sas", "secret", "secrets", "sessionid", "sig", "signature", "token", "webhook", "xsrf",
    "clave", "contrasena", "haslo", "heslo", "kennwort", "losenord", "parola", "salasana", "senha", "wachtwoord",
))  # fmt: skip
_SECRET_PHRASES = (
    "accesscode", "authcode", "motdepasse", "palavrapasse", "pincode", "recoverycode", "secretid", "verificationcode",
)  # fmt: skip
"""Names of several words, of which none alone says so."""
_SECRET_ENDINGS = (
    "token", "password", "passwd", "passphrase", "pass", "pwd", "secret", "secrets", "credential", "credentials",
    "apikey", "accesskey", "authkey", "secretkey", "privatekey", "encryptionkey", "signingkey", "cookie", "webhook",
    "bindpw", "rootpw",
)  # fmt: skip
_WORDS_IN_PASS = frozenset(["bypass", "compass", "encompass", "overpass", "surpass", "trespass", "underpass"])
# Words that have another meaning in training: a number under them, or a type, is no secret.
_AMBIGUOUS = frozenset(["auth", "key", "keys", "pass", "pat", "pw", "sas", "sig", "signature", "token", "webhook"])
# A name that ends so describes a secret, or counts tokens: `token_ids`, `key_dim`, `auth_method`, `api_key_file`.
_DESCRIPTIONS = frozenset((
    "algorithm", "backend", "bias", "cache", "count", "counts", "dim", "dims", "dir", "dispatcher", "dropping",
    "dtype", "embedding", "embeddings", "enabled", "expires", "expiry", "file", "function", "group", "groups",
    "head", "heads", "id", "ids", "idx", "index", "kind", "len", "length", "limit", "limits", "mask", "method",
    "mode", "name", "names", "norm", "num", "padding", "path", "policy", "pos", "position", "proj", "projection",
    "provider", "rate", "required", "ring", "scale", "seq", "shape", "size", "states", "timeout", "ttl", "type",
    "types", "value", "values", "version", "weights",
))  # fmt: skip
# `eos_token` and `cache_key` name no secret.
_NOT_BEFORE = {
    "token": frozenset((
        "audio", "begin", "bos", "class", "cls", "decoder", "end", "eos", "expert", "extra", "first", "image",
        "last", "mask", "max", "min", "new", "next", "num", "pad", "per", "prefix", "prompt", "sep", "shared",
        "special", "start", "stop", "suffix", "text", "unk", "video", "vocab",
    )),
    "key": frozenset((
        "attn", "cache", "data", "dict", "foreign", "group", "index", "join", "label", "lookup", "map", "metric",
        "param", "partition", "primary", "public", "query", "sort", "state", "step", "tensor",
    )),
}  # fmt: skip
_NOT_BEFORE["keys"] = _NOT_BEFORE["key"]
_NOT_AFTER = {"key": frozenset(("value", "values", "query", "padding"))}
_LOGINS = frozenset(["credentials", "creds", "login", "user", "userpwd", "username", "proxyuser"])
_NAME = re.compile(r"[-+~/]{0,2}(?:[^\W\d]|[_$])[\w.:$\[\]-]{0,99}\Z")
_FLAG = re.compile(r"-{1,2}[A-Za-z]")
_HEADERS = re.compile(
    r"(?:proxy-)?authorization|(?:set-)?cookie2?|x-[\w-]*(?:auth|key|token|secret|signature)[\w-]*", re.IGNORECASE
)

SECRET, AMBIGUOUS, LOGIN = "secret", "ambiguous", "login"

# Forms ---------------------------------------------------------------------------------------------------------------
_FORMS = re.compile(
    "|".join(
        (
            # Tokens that begin with the name of who issued them.
            r"(?<![A-Za-z0-9])(?:hf|npm|gh[pousr]|glsa|glc|shp(?:at|ss|ca|pa)|api_org|gsk|r8|fw|nfp|pnu|rdme|ntn|sgp|phc|phx|"
            r"figd|ops|secret|e2b|whsec|sbp|rpa|KGAT|bkua|aph0|sntry[su]|rubygems|lin_api|CLOJARS|EZ[AT]K|[rsp]k_(?:live|test|prod)|key_live)_"
            r"(?=[A-Za-z0-9]*\d)[A-Za-z0-9]{16,}[\w=+/-]*",
            r"(?<![A-Za-z0-9])(?:github_pat|dckr_[po]at|d[oopr]{2}_v1|pscale_(?:tkn|pw|oauth)|lsv2_(?:pt|sk)|tgp_v1|jina|"
            r"wandb_v1|pcsk|CCIPAT|duffel_(?:test|live)|FLWSECK(?:_TEST)?)_(?=\w*\d)[\w-]{16,}",
            r"(?<![A-Za-z0-9])(?:gl(?:pat|dt|rt|cbt|ptt|ft|soat|imt|agent|oas)|sk|pypi|xox[a-z]|xapp|nvapi|PMAK|NRAK|"
            r"NRJS|xai|csk|pplx|pul|tskey|fio-u|shippo_(?:live|test)|xkeysib|xsmtpsib|sq0[ci]\w\w|GOCSPX|AGE-SECRET-KEY|"
            r"A3|FLWSECK(?:_TEST)?|v1\.0|R8|p8e|LTAI|key|SK|CFPAT|cio|ATATT3|sl)-(?=[\w.-]{16})(?=[\w.-]*\d)[\w.-]+",
            r"(?<![A-Za-z0-9])(?:secret_lambda_[0-9a-f]{32}\.\w{20,}|[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,}|sl\.[Bu][\w-]{100,}|"
            r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9.]{40,}|snyk_[us]at\.[0-9a-f]{8}\.[\w-]{40,}|mfa\.[\w-]{80,}|"
            r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}|\d/\d{16}(?:/\d{16})?:[0-9a-f]{32}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|1//0[\w-]{30,}|ATATT3[\w=-]{60,}|LTAI[A-Za-z0-9]{16,}|"
            r"AKC[a-zA-Z0-9]{40,}|cmVmd[A-Za-z0-9]{50,}|dapi[0-9a-f]{32}|EAA[A-Za-z0-9]{60,}|4b1d[A-Za-z0-9]{38}|"
            r"key-[0-9a-f]{32}|dt0[a-z]\d\d\.[A-Z0-9]{20,}\.[A-Z0-9]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|hv[sbr]\.[\w-]{20,}|"
            r"[0-9a-z]{32}-us\d{1,2}|(?:AC|SK)[0-9a-f]{32}|\d{8,10}:[\w-]{35}|T3BlbkFJ[\w-]{20,}|GR1348941[\w-]{20,})"
            r"(?![A-Za-z0-9])",
            r"(?<![A-Z0-9])(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA|ANPA|ANVA)[A-Z0-9]{16}(?![A-Z0-9])",
            r"(?<![\w~.-])[\w~.]{3}\dQ~[\w~.-]{31,34}(?![\w~.-])",  # a client of Azure
            r"(?<![\w.-])[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,38}(?![\w-])",  # a bot of Discord
            r"(?<![\w.-])[ps]k\.eyJ[\w-]{16,}\.[\w-]{16,}",
            r"(?<![\w.-])eyJ[\w-]{6,}(?:\.[\w=+/-]*){0,4}",  # JSON web tokens, and other JSON in base64
            r"-----BEGIN[ ][A-Z0-9 ]*PRIVATE[ ]KEY(?:[ ]BLOCK)?-----(?:(?!-----END).)*(?:-----END[A-Z0-9 ]*-----)?",
            r"PuTTY-User-Key-File-\d.*",
            r"(?<=[Bb]earer\s)[\w.~+/=-]{6,}|(?<=BEARER\s)[\w.~+/=-]{6,}|(?<=[Bb]asic\s)(?=[\w+/-]*[A-Z0-9=])[\w+/=-]{8,}",
            r"(?<=AccountKey=)[\w+/=-]+|(?<=SharedAccessKey=)[\w+/=-]+|(?<=SharedAccessSignature=)[^\s\"';]+",
            # Addresses that whoever has them can write to: webhooks and bots.
            r"(?<=://)[\w.-]*(?:hooks?|webhooks?)\.[\w.-]+/[^\s\"'<>]+",
            r"(?<=://)(?:hc-ping\.com|events\.pagerduty\.com)/[^\s\"'<>]+",
            r"(?<=://)[^\s\"'<>/]{1,256}(?=/)[^\s\"'<>]{0,512}(?:web_?hooks?|/hooks?/|/services/|incoming-?hook|/bot/)[^\s\"'<>]*",
            r"(?<=/bot)\d+:[\w-]+",
        )
    ),
    re.DOTALL,
)
# A password may hold `/`, `?` and `#`: what stands before the last `@` is the login.
# Runs of one kind of character are bounded, or not tried again (`++`): a long text may be one run.
_URL_LOGIN = re.compile(r"(?<=://)(?:[^\s/@:\"'<>]{0,256}:[^\s\"'<>]{0,512}|[^\s/@:\"'<>]{1,256})(?=@[\w\[<])")
_BARE_LOGIN = re.compile(r"(?<![\w./:@<-])[\w.+-]+:([^\s:@/\"'<>]{3,})(?=@(?!sha\d)[\w.-]+)")
_ASSIGNMENT = re.compile(
    r"(?P<name>(?:[^\W\d]|[_$])[\w.$-]{0,200}+(?:\[\w{0,200}+\])?+)[\]\\\"'`]{0,99}+"
    r"(?P<sign>\s{0,99}+(?::=|=>|==?|%3[Dd]|(?<!:):(?!:))\s*+)(?=(?P<rest>.))",
    re.DOTALL,
)
_QUOTED = re.compile(r"(\\{0,99}+[\"'`])((?:(?!\1).|(?<=\\)\1)*)(?<!\\)\1", re.DOTALL)
_UNQUOTED = re.compile(
    r"(?:(?:bearer|basic|token|digest|negotiate|apikey)\s+)?(?:\[redacted\]|[^\s\"'`&;,)}\]<>\\]+)", re.IGNORECASE
)
_LINE = re.compile(r"[^\r\n\0\"'`]+")
_REST_OF_LINE = re.compile(r"[^\r\n\0]+")
_FLAG_IN_TEXT = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w.-]*)\s+(?P<rest>[^\s-])")
_LOGIN_COMMAND = re.compile(
    "|".join(
        (
            r"\blogin\s+(?:--\w[\w-]*\s+)*([A-Za-z0-9_-]{20,})",
            r"\bidentified\s+by\s+(?:'|\")([^'\"]+)",
            r"sshpass\s+-p\s*(\S+)",
            r"\b(?:docker|podman|nerdctl|skopeo|crane|registry|az|oc)\s+login\b[^|;&\r\n]{0,200}?\s-p[\s=]+([^\s|;&]+)",
            r"\bmysql(?:dump|admin)?\b[^|;&\r\n]{0,200}?\s-p([^\s|;&]+)",
            r"\bzip\s(?:[^|;&\r\n]{0,200}?\s)?-P\s+([^\s|;&]+)",
            r"\bredis-cli\b[^|;&\r\n]{0,200}?\s-a\s+([^\s|;&]+)",
            r"\bopenssl\b[^|;&\r\n]{0,200}?\s-k\s+([^\s|;&]+)",
            r"\bssh-keygen\b[^|;&\r\n]{0,200}?\s(?-i:-[NP])\s+([^\s|;&-][^\s|;&]*)",
            r"\bldap(?:add|delete|modify|modrdn|passwd|search|whoami)\b[^|;&\r\n]{0,200}?\s(?-i:-w)\s+([^\s|;&]+)",
            r"\b(?:7z[ar]?|rar|unrar)\s[^|;&\r\n]{0,200}?(?<=\s)-(?:hp|p)([^\s|;&-][^\s|;&]*)",
            r"\bcurl\b[^|;&\r\n]{0,200}?\s(?-i:-u)[^\s|;&:-][^\s|;&:]*:([^\s|;&]+)",
            r"\bmc\s+(?:alias|config)\s[^|;&\r\n]{0,200}?://\S+\s+\S+\s+([^\s|;&]+)",
            # A setting without a sign: of redis, `aws configure set`.
            r"(?<![\w-])(?:requirepass|masterauth|[A-Za-z]\w*_(?:password|passwd|secret|secret_(?:access_)?key|api_key|(?:access|auth)_token))"
            r"[ \t]+(?=\S*\d)(?=\S*[A-Za-z])([^\s'\"=:]{6,})",
            r"\bmachine\s+\S{1,200}\s+login\s+\S{1,200}\s+password\s+(\S+)",
            r"\bjdbc:oracle:\w+:[^/\s]{1,200}/([^@\s]+)@",
            r"\bdigest\s[^\r\n]{0,500}?\bresponse=\\?\"([^\"\\]+)",
            r"\bcredentials?\s*[:=]\s*\w+/(?=\S*\d)([^\s/'\"]{6,})",
            r"\b(?:password|passphrase|passcode)\s+for\s+[^:\r\n]{1,200}:\s+(\S{4,})",
            # Prose: "the API key is …", "with password … for bob".
            r"\b(?:password|passphrase|passcode|token|secret|(?:api|access|secret|private|auth)[ _-]?key)\s+(?:is|was)"
            r"\s+['\"]?(?=\S*\d)(?=\S*[A-Za-z])([^\s'\"]{6,})",
            r"\b(?:with|using|use|uses|try|trying)\s+(?:the\s+|a\s+)?(?:password|passphrase|passcode|api[ _-]?key)\s+"
            r"['\"]?(?=\S*\d)(?=\S*[A-Za-z])([^\s'\"]{6,})",
        )
    ),
    re.IGNORECASE,
)
_SHELL_VARIABLE = re.compile(r"\b(?:setenv|set\s+-\w+)\s+(?P<name>\w+)\s+(?P<rest>\S)")
_COMMANDS_WITH_LOGIN = frozenset((
    b"7z", b"7za", b"7zr", b"aws", b"az", b"comet", b"crane", b"curl", b"docker", b"gh", b"hf", b"huggingface-cli",
    b"ldapadd", b"ldapdelete", b"ldapmodify", b"ldappasswd", b"ldapsearch", b"ldapwhoami", b"mc", b"mysql",
    b"mysqladmin", b"mysqldump", b"nerdctl", b"oc", b"openssl", b"podman", b"rar", b"redis-cli", b"skopeo",
    b"ssh-keygen", b"sshpass", b"unrar", b"wandb", b"zip",
))  # fmt: skip
_NAME_AND_VALUE = re.compile(
    r"\b(?:name|key|variable)[\"']?\s*+[:=]\s*+[\"']?(?P<name>[A-Za-z_][\w.-]*+)[\"']?\s*+,?+\s*+"
    r"(?<![\w.-])[\"']?value[\"']?\s*+[:=]\s*+(?P<rest>\S)"
)
# YAML: a tag, or a block of lines, before the value.
_YAML_BLOCK = re.compile(
    r"(?:!\w+[ \t]+)?[|>][-+\d]*[ \t]*\r?\n(?P<indent>[ \t]+)[^\r\n]+(?:\r?\n(?P=indent)[^\r\n]+)*"
)
_YAML_TAG = re.compile(r"!\w+[ \t]+")
_ATTRIBUTE = re.compile(
    r"""<[^<>]{0,200}?\b(?:key|name|type|id)=\\?["']([\w.:-]+)\\?["'][^<>]{0,200}?\bvalue=\\?["']([^"'<>\\]+)"""
)
_CALL = re.compile(r"[A-Za-z_][\w.]{0,99}\(\s*(?=\\*[\"'])")
_ELEMENT = re.compile(r"<([\w:.-]++)[^<>]*+>([^<>]++)</")
_TYPES = re.compile(
    r"(?:none|null|nil|true|false|nan|\.\.\.|\*+|x{3,}|lambda\b.*|self\b.*|(?:const|unsigned|long|int|float|double|bool|char|"
    r"void|str|bytes|dict|list|tuple|set|any|optional|union|tensor|torch|at|c10|std|string|callable|sequence)"
    r"(?:[\s.\[(:*?].*)?)\Z",
    re.IGNORECASE | re.DOTALL,
)
_VARIABLE = re.compile(r"\$\w+|\$?\{++[^{}]*+\}++|%\w+%?|<[^<>]*>|@\w+@")
_PLACEHOLDER = re.compile(r"(?:\[redacted\]|<[a-z]+\d+>)[\w./@-]*\Z")
_PINNED = re.compile(r"\d+(?:\.\w+)+")
_NUMBER = re.compile(r"-?[\d.,]+(?:[eE][-+]?\d+)?\Z")

# Randomness ----------------------------------------------------------------------------------------------------------
_RUN = re.compile(r"(?<![\w+/=.-])[A-Za-z0-9+/=_-]{24,256}(?![\w+/=.:(<-])")
_CLASS_OF = {
    **dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 1),
    **dict.fromkeys("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 2),
    **dict.fromkeys("0123456789", 3),
}
# Neighbours in random base 62 are of unlike classes (lower, upper, digit) in 62% of pairs; in names of models, modules
# and kernels in at most 40%, and these have more separators.
_UNLIKE_NEIGHBOURS_RATIO = 0.42
# Of random letters 19% stand in runs of three small ones or more; of `SubTensorOpWithCastTensor1d` 74%.
_WORD_LIKE = re.compile(r"[A-Z]?[a-z]{3,}")
_WORD_LIKE_RATIO = 0.5
_SEPARATORS_RATIO = 0.12
_MIN_ENTROPY_BITS = 3.8

STRING = re.compile(rb'(?<!\\)"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_HAS_WORD = re.compile(rb"[A-Za-z_]{2}|-u")
_COLON = re.compile(rb"\s*:\s*")
_COMMA = re.compile(rb"\s*,\s*(?=\")")
_JSON_NUMBER = re.compile(rb"-?\d[\d.eE+-]*")
_VALUE_KEYS = frozenset((b"value", b"val", b"content", b"default", b"data", b"string", b"text"))
_JSON_BEGIN = re.compile(r"[\[{](?=\s*[\[{\"])")
_MAX_NESTED_JSON = 6
_MAX_PASSES = 4
_MAX_REPLACED_ONE_BY_ONE = 8
_MAX_REMEMBERED = 1_000_000


def redact(text: bytes) -> bytes:
    """JSON text with `[redacted]` in the place of secrets."""
    return Redactor(lambda _, __: REDACTED).redact(text)


class Redactor:
    """Replaces secrets in JSON text by what `placeholder` returns for them.

    `placeholder` also gets whether the value stands under a name that can mean nothing but a secret.
    """

    def __init__(self, placeholder: Callable[[str, bool], str]) -> None:
        self._placeholder = placeholder
        self._seen: set[bytes] = set()
        self._names: dict[bytes, str] = {}
        self._commands: set[bytes] = set()
        self._clean: dict[bytes, bytes] = {}
        self._nesting = 0

    def redact(self, text: bytes) -> bytes:
        """JSON text, whole or a part that splits no string, without secrets. Nothing but strings of secrets changes.

        A number is replaced by a text where its name can mean nothing but a secret.
        """
        return self.redact_strings(text, set(STRING.findall(text)))

    def redact_strings(self, text: bytes, strings: set[bytes]) -> bytes:
        """`redact` of a text whose strings, as JSON writes them, are found already."""
        if len(self._seen) > _MAX_REMEMBERED:
            self._seen.clear()
        for raw in strings - self._seen:
            self._inspect(raw)
        names = [(raw, self._names[raw]) for raw in strings & self._names.keys()]
        replacements = [*self._replacements(text, names)]
        for command in strings & self._commands:
            replacements += self._in_command(text, b'"%b"' % command)
        parts, end = [], 0
        for start, stop, new in sorted(replacements):
            if start >= end:
                parts += [text[end:start], new]
                end = stop
        text = b"".join((*parts, text[end:])) if parts else text
        changed = strings & self._clean.keys()
        if len(changed) <= _MAX_REPLACED_ONE_BY_ONE:
            for raw in changed:
                text = text.replace(b'"%b"' % raw, b'"%b"' % self._clean[raw])
        else:
            text = STRING.sub(lambda match: b'"%b"' % self._clean.get(match[1], match[1]), text)
        return text

    def redact_text(self, text: str) -> str:
        """One text without secrets."""
        for _ in range(_MAX_PASSES):  # what stands beside a placeholder may be seen as a secret only then
            before = text
            if "{" in text or "[" in text:
                text = self._redact_json_within(text)
            parts, end = [], 0
            for start, stop in sorted(_spans(text), key=lambda span: (span[0], -span[1])):
                if start >= end and not is_harmless(text[start:stop]):
                    parts += [text[end:start], self._placeholder(text[start:stop], False)]
                    end = stop
            text = "".join((*parts, text[end:]))
            if text == before:
                break
        return text

    def _inspect(self, raw: bytes) -> None:
        self._seen.add(raw)
        if raw.rpartition(b"/")[2] in _COMMANDS_WITH_LOGIN:
            self._commands.add(raw)
        if not _HAS_WORD.search(raw):
            return
        text = decode(raw)
        kind = kind_of_name(text)
        if kind is not None:
            self._names[raw] = kind
        clean = self.redact_text(text)
        if clean != text:
            self._clean[raw] = _encode(clean)

    def _redact_json_within(self, text: str) -> str:
        """Text with the JSON in it redacted: a configuration in an argument, also one in another."""
        begin = _JSON_BEGIN.search(text)
        if begin is None or self._nesting >= _MAX_NESTED_JSON:
            return text
        try:
            _, end = json.JSONDecoder().raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            return text
        self._nesting += 1
        try:
            inside = self.redact(text[begin.start() : end].encode("utf-8", "surrogatepass"))
        finally:
            self._nesting -= 1
        return text[: begin.start()] + inside.decode("utf-8", "surrogatepass") + text[end:]

    def _replacements(self, text: bytes, names: list[tuple[bytes, str]]) -> Iterator[tuple[int, int, bytes]]:
        """Start, end and replacement of what stands under names, or follows a flag."""
        for raw, kind in names:
            written = b'"%b"' % raw
            at = text.find(written)
            while at >= 0:
                after = at + len(written)
                if (colon := _COLON.match(text, after)) is not None:
                    yield from self._value(text, colon.end(), kind)
                elif (comma := _COMMA.match(text, after)) is not None:
                    yield from self._next_in_list(text, comma.end(), kind, is_flag=raw.startswith(b"-"))
                at = text.find(written, after)

    def _in_command(self, text: bytes, command: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Replacements in lists of arguments that begin with a command whose options take a password."""
        at = text.find(command)
        while at >= 0:
            strings, pos = [], at
            while (string := STRING.match(text, pos)) is not None:
                strings.append(string)
                comma = _COMMA.match(text, string.end())
                if comma is None:
                    break
                pos = comma.end()
            words = [decode(string[1]) for string in strings]
            starts = list(itertools.accumulate((len(word) + 1 for word in words), initial=0))
            for match in _LOGIN_COMMAND.finditer(" ".join(words)):
                begin, end = match.span(match.lastindex or 0)
                number = bisect.bisect_right(starts, begin) - 1
                begin, end = begin - starts[number], min(end - starts[number], len(words[number]))
                secret = words[number][begin:end]
                if not is_harmless(secret):
                    clean = words[number][:begin] + self._placeholder(secret, True) + words[number][end:]
                    yield *strings[number].span(1), _encode(clean)
            at = text.find(command, at + len(command))

    def _value(self, text: bytes, pos: int, kind: str) -> Iterator[tuple[int, int, bytes]]:
        """Replacements in the value that begins at a place: its strings, and its numbers if `kind` is SECRET."""
        depth = 0
        while pos < len(text):
            string = STRING.match(text, pos) if text[pos : pos + 1] == b'"' else None
            number = _JSON_NUMBER.match(text, pos) if string is None and kind == SECRET else None
            if string is not None:
                pos = string.end()
                if not (depth and _COLON.match(text, pos)):  # a key
                    yield from self._string(string, kind)
            elif number is not None:
                pos = number.end()
                yield number.start(), pos, b'"%b"' % _encode(self._placeholder(number[0].decode(), True))
            else:
                depth += text[pos : pos + 1] in (b"[", b"{")
                depth -= text[pos : pos + 1] in (b"]", b"}")
                pos += 1
                if depth < 0:
                    return
            if depth == 0 and (string is not None or number is not None or text[pos - 1 : pos] not in b" \t\r\n"):
                return

    def _next_in_list(self, text: bytes, pos: int, kind: str, *, is_flag: bool) -> Iterator[tuple[int, int, bytes]]:
        """Replacement of what follows a name in a list, or of the `value` where the name is a `name` of an object."""
        string = STRING.match(text, pos)
        if string is None:
            return
        colon = _COLON.match(text, string.end())
        if colon is not None:
            if string[1].lower() in _VALUE_KEYS:
                yield from self._value(text, colon.end(), kind)
        elif not string[1].startswith(b"--") and (is_flag or kind == SECRET):
            yield from self._string(string, kind)

    def _string(self, string: "re.Match[bytes]", kind: str) -> Iterator[tuple[int, int, bytes]]:
        text = decode(string[1])
        if kind == LOGIN:
            name, sign, password = text.partition(":")
            if sign and password and not is_harmless(password) and not password.startswith("//"):
                yield *string.span(1), _encode(f"{name}:{self._placeholder(password, True)}")
        elif not is_harmless(text):
            yield *string.span(1), _encode(self._placeholder(text, kind == SECRET))


def kind_of_name(name: str) -> str | None:
    """What a name says of its value: SECRET, AMBIGUOUS (in training it also means something else), LOGIN, or None.

    >>> [kind_of_name(name) for name in ("HF_TOKEN", "apiKey", "--db-pass", "key", "eos_token", "lr")]
    ['secret', 'secret', 'secret', 'ambiguous', None, None]
    """
    if not _NAME.match(name):
        return None
    words = _words_of_name(name)
    if not words:
        return None
    if "".join(words).endswith(_SECRET_PHRASES):
        return SECRET
    if "".join(words) in _LOGINS or words[-1] in ("login", "userpwd") or name == "-u":
        return LOGIN
    if words[-1] in _DESCRIPTIONS and words[-3:] != ["access", "key", "id"]:
        return None
    for position, word in enumerate(words):
        before, after = words[max(position - 1, 0) : position], words[position + 1 : position + 2]
        if not (word in _SECRET_WORDS or (word.endswith(_SECRET_ENDINGS) and word not in _WORDS_IN_PASS)):
            continue
        if _NOT_BEFORE.get(word, frozenset()).intersection(before) or _NOT_AFTER.get(word, frozenset()).intersection(
            after
        ):
            continue
        return AMBIGUOUS if len(words) == 1 and word in _AMBIGUOUS else SECRET
    return None


def _words_of_name(name: str) -> list[str]:
    """Lower-case words of a name, without accents, and without `value` after a secret: `token_value` is the token."""
    if not name.isascii():
        name = "".join(letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    words = [word.lower() for word in _WORDS.findall(name)]
    is_of_value = len(words) > 1 and words[-1] == "value" and words[-2] not in _NOT_AFTER
    return words[:-1] if is_of_value else words


def safe_end(text: bytes) -> int:
    """Place to split at, outside of strings: after the last object of a line or list, else after a line, else an item.

    What a key or a flag announces stands in the same object. A JSON string has no line break, but may hold `},`.
    """
    for ending in (b"}\n", b"},\n", b"},", b"\n", b","):
        end = text.rfind(ending) + len(ending)
        if end >= len(ending) and (ending[-1:] == b"\n" or _quotes(text[:end]) % 2 == 0):
            return end
    return 0


def is_harmless(value: str) -> bool:
    """Return whether a value under a name of secrets is none: empty, a placeholder, a variable, a type.

    >>> [is_harmless(value) for value in ("", "[redacted]", "<secret3>", "${HF_TOKEN}", "None", "Tensor", "hunter2")]
    [True, True, True, True, True, True, False]
    """
    value = value.strip()
    return not value or any(pattern.fullmatch(value) for pattern in (_PLACEHOLDER, _TYPES, _VARIABLE))


def is_random(text: str) -> bool:
    """Return whether a word of 24 letters and digits or more looks random, rather than composed of words.

    >>> is_random("wJalrXUtnFEMI9K7MDENGbPxRfiCYzQ3kLmT8vWs")
    True
    >>> is_random("Mixtral-8x7B-Instruct-v0"), is_random("0123456789abcdef0123456789abcdef01234567")
    (False, False)
    """
    if text.startswith(("_Z", "GPU-", "MIG-", "sha256-")) or "_ZN" in text:
        return False
    classes = [_CLASS_OF.get(letter, 0) for letter in text.rstrip("=")]
    if not {1, 2, 3} <= set(classes) or classes.count(0) > _SEPARATORS_RATIO * len(classes):
        return False
    if sum(map(len, _WORD_LIKE.findall(text))) > _WORD_LIKE_RATIO * len(text):
        return False
    unlike = sum(left != right for left, right in itertools.pairwise(classes) if left and right)
    return unlike >= _UNLIKE_NEIGHBOURS_RATIO * (len(classes) - 1) and _entropy_bits(text) >= _MIN_ENTROPY_BITS


def _quotes(text: bytes) -> int:
    """Number of quotes that begin or end a string."""
    return text.count(b'"') if b'\\"' not in text else _ESCAPE.sub(b"", text).count(b'"')


def _entropy_bits(text: str) -> float:
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each secret in a text, in no order; they can overlap."""
    for pattern in (_FORMS, _URL_LOGIN):
        yield from (match.span() for match in pattern.finditer(text))
    for pattern in (_BARE_LOGIN, _LOGIN_COMMAND):
        yield from (match.span(match.lastindex or 0) for match in pattern.finditer(text))
    for pattern in (_ELEMENT, _ATTRIBUTE):
        yield from (match.span(2) for match in pattern.finditer(text) if kind_of_name(match[1]) in (SECRET, AMBIGUOUS))
    yield from (match.span() for match in _RUN.finditer(text) if is_random(match[0]))
    yield from _assignment_spans(text)
    for pattern in (_FLAG_IN_TEXT, _SHELL_VARIABLE, _NAME_AND_VALUE):
        for named in pattern.finditer(text):
            kind = kind_of_name(named["name"])
            if kind is not None:
                yield from _value_span(text, named.start("rest"), kind, whole_line=False)


def _assignment_spans(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of what is assigned to names of secrets: `name=value`, `name: value`, `"name": "value"`."""
    options_end, reached = len(text) - len(text.lstrip("-+~ ")), 0
    for match in _ASSIGNMENT.finditer(text):
        name = match["name"]
        if match.start("rest") < reached:  # within a value that ends where this one would
            continue
        kind = kind_of_name(name)
        if kind is None:
            continue
        if kind == AMBIGUOUS and match["sign"][:1].isspace():
            continue  # "[with Key = unsigned long]", of the name of a kernel
        if match["sign"].strip() == "==" and _PINNED.match(text, match.start("rest")):
            continue  # "google-auth==2.40.3"
        is_header = _HEADERS.fullmatch(name) is not None and ":" in match["sign"]
        is_argument = match.start() <= options_end and "=" in match["sign"]
        for start, end in _value_span(text, match.start("rest"), kind, whole_line=is_argument or is_header):
            reached = end
            yield start, end


def _value_span(text: str, pos: int, kind: str, *, whole_line: bool) -> Iterator[tuple[int, int]]:
    """Start and end of the value at a place: in quotes (also in a call), to the end of the line, or one word."""
    block = _YAML_BLOCK.match(text, pos)
    if block is not None:
        yield block.start("indent"), block.end()
        return
    tag = _YAML_TAG.match(text, pos)
    pos = pos if tag is None else tag.end()
    call = _CALL.match(text, pos)
    quoted = _QUOTED.match(text, pos if call is None else call.end())
    if quoted is not None:
        start, end = quoted.span(2)
    else:
        value = (_LINE if whole_line else _UNQUOTED).match(text, pos)
        if value is None:
            return
        start, end = value.span()
    if kind == LOGIN:
        colon = text.find(":", start, end)
        if colon < 0 or text.startswith("//", colon + 1):
            return
        start = colon + 1
    if kind == AMBIGUOUS and _NUMBER.match(text[start:end]):
        return
    yield start, end


def decode(raw: bytes) -> str:
    """Text that the raw characters of a JSON string mean."""
    text = raw.decode("utf-8", "surrogateescape")
    if b"\\" not in raw:
        return text
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _encode(text: str) -> bytes:
    try:
        return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a pair, which JSON writes as an escape
        return json.dumps(text)[1:-1].encode()
