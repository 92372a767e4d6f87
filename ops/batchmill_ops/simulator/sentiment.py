"""A tiny multilingual sentiment classifier, so that the simulated model's labels can be looked at."""

from __future__ import annotations

import re

LABELS = ("positive", "negative", "neutral")

_POSITIVE = """
    good great excellent amazing awesome fantastic wonderful perfect perfectly love loved loves lovely best superb brilliant
    outstanding happy delighted pleased impressed recommend recommended reliable sturdy comfortable beautiful gorgeous enjoy
    enjoyed works flawless flawlessly nice worth favorite favourite thrilled satisfied terrific solid delicious smooth easy
    gut gute guter gutes super toll tolle toller tolles ausgezeichnet hervorragend hervorragende perfekt perfekte liebe
    begeistert zufrieden empfehlen empfehlenswert empfehlung klasse schön schöne wunderbar beste bestens großartig einwandfrei
    bon bonne excellente parfait parfaite génial géniale superbe magnifique adore recommande ravi ravie satisfait satisfaite
    meilleur meilleure merveilleux impeccable formidable solide agréable
    bueno buena excelente perfecto perfecta genial increíble encanta encantó recomiendo mejor maravilloso maravillosa contento
    contenta satisfecho satisfecha estupendo fantástico cómodo cómoda
    buono buona ottimo ottima eccellente perfetto perfetta fantastico fantastica consiglio adoro bellissimo bellissima
    soddisfatto soddisfatta migliore meraviglioso comodo
    bom boa ótimo ótima perfeito perfeita adorei amei recomendo melhor maravilhoso maravilhosa satisfeito satisfeita incrível
    goed goede geweldig geweldige uitstekend uitstekende perfecte tevreden aanrader prachtig fantastische
    utmärkt fantastisk nöjd rekommenderar bästa underbar
    dobry dobra świetny świetna świetnie doskonały doskonała polecam zadowolony zadowolona wspaniały idealny
    хороший хорошая хорошо отлично отличный отличная прекрасный прекрасно супер нравится рекомендую доволен довольна лучший
    великолепный идеально
    harika mükemmel güzel iyi süper memnun memnunum tavsiye beğendim
"""
_NEGATIVE = """
    bad terrible awful horrible worst poor poorly broken broke breaks hate hated disappointing disappointed disappointment useless
    waste defective faulty refund return returned returning cheap flimsy slow ugly uncomfortable annoying fails failed failure
    stopped leaks leaked unreliable misleading overpriced garbage junk trash regret cracked scratched damaged dead avoid
    schlecht schlechte schlechter furchtbar schrecklich kaputt enttäuscht enttäuschend enttäuschung mangelhaft defekt miserabel
    zurückgeschickt zurückgegeben billig nutzlos ärgerlich schlechteste unbrauchbar reklamation
    mauvais mauvaise terrible horrible déçu déçue décevant décevante nul nulle cassé cassée inutile pire défectueux défectueuse
    remboursement arnaque fragile
    malo mala pésimo pésima terrible horrible decepcionado decepcionada decepcionante roto rota inútil peor defectuoso defectuosa
    devolución devolví estafa
    cattivo cattiva pessimo pessima terribile orribile deluso delusa deludente rotto rotta inutile peggiore difettoso difettosa
    rimborso reso
    ruim péssimo péssima terrível horrível decepcionado decepcionante quebrado quebrou quebrada inútil pior defeituoso reembolso
    slecht slechte vreselijk teleurgesteld teleurstellend kapot waardeloos
    dålig dåligt hemsk besviken trasig värdelös
    zły zła zło źle okropny okropna zepsuty zepsuta rozczarowany rozczarowana beznadziejny słaby słaba
    плохой плохая плохо ужасный ужасно ужасная разочарован разочарована сломался сломалась сломан отвратительно худший брак
    kötü berbat bozuk bozuldu rezalet iade pişman
"""
_NEGATORS = """
    not no never don't doesn't didn't isn't wasn't nicht kein keine keinen nie pas jamais aucun nada nunca non mai niet geen
    inte не ни değil não
"""
# Scripts that put no spaces between words, or glue prefixes and vowel signs to them: searched as substrings.
_POSITIVE_PARTS = """
    很好 非常好 喜欢 满意 推荐 完美 优秀 棒 不错 超值 好用 最高 素晴らしい 良い 良かった 満足 おすすめ 大好き 気に入 快適 完璧 便利
    좋아요 좋습니다 좋은 훌륭 최고 만족 추천 완벽 예쁘 अच्छा अच्छी बढ़िया शानदार बेहतरीन उत्तम पसंद खुश
    ممتاز رائع جيد جميل أنصح سعيد مذهل ดีมาก ชอบ ยอดเยี่ยม แนะนำ ประทับใจ מצוין מעולה נהדר מומלץ
"""
_NEGATIVE_PARTS = """
    不好 很差 太差 差评 失望 糟糕 坏了 垃圾 退货 不推荐 不满意 不喜欢 后悔 最悪 悪い がっかり 壊れ 残念 返品 不満 ひどい 使えない
    나빠 나쁜 별로 최악 실망 고장 환불 불만 형편없 खराब बेकार बुरा घटिया निराश टूट वापस
    سيئ سيء رديء مخيب معطل مكسور أسوأ แย่ ผิดหวัง พัง เสีย ห่วย גרוע נורא מאכזב שבור
"""
_WORD_SCORES = dict.fromkeys(_NEGATIVE.split(), -1) | dict.fromkeys(_POSITIVE.split(), 1)
_PART_SCORES = dict.fromkeys(_NEGATIVE_PARTS.split(), -1) | dict.fromkeys(_POSITIVE_PARTS.split(), 1)
# Words are looked up as UTF-8: splitting bytes by a table of 256 is several times faster than by str.translate.
_BYTE_SCORES = {word.encode(): score for word, score in _WORD_SCORES.items()}
_SCORED = frozenset(_BYTE_SCORES)
_NEGATING = frozenset(word.encode() for word in _NEGATORS.split())
_NO_WORD = bytes.maketrans(b'.,;:!?()[]{}"<>/|*_-', b" " * 20)
_FANCY = str.maketrans(dict.fromkeys("“”„«»–—…¡¿", " ") | {"’": "'"})
# Longest first, so that "not recommended" is found before "recommended" where one contains the other.
_PARTS = re.compile("|".join(sorted(_PART_SCORES, key=len, reverse=True)))
_SPACELESS = re.compile("[\u0590-\U0010ffff]")  # Hebrew and on; Latin, Greek and Cyrillic come before it
_STARS = re.compile(r"([1-5])(?<!\d\d)\s*(?:/\s*5|stars?\b|sterne?\b|étoiles?\b|estrellas?\b|stelle\b)")
_STAR = "★"


def sentiment(text: str) -> str:
    """``positive``, ``negative`` or ``neutral`` by the words of ``text``; neutral when they balance or say nothing.

    It runs for every simulated call, so it avoids what costs more than a few microseconds.
    """
    lowered = text.lower()
    score = _word_score(lowered) + _star_score(lowered)
    if not text.isascii() and _SPACELESS.search(text):
        score += sum(_PART_SCORES[part] for part in _PARTS.findall(text))
    return LABELS[0] if score > 0 else LABELS[1] if score < 0 else LABELS[2]


def _word_score(lowered: str) -> int:
    """Each known word counts once, turned round when one of the two words before it negates it."""
    plain = lowered if lowered.isascii() else lowered.translate(_FANCY)
    words = plain.encode().translate(_NO_WORD).split()
    score = 0
    for word in _SCORED.intersection(words):
        position = words.index(word)
        negated = not _NEGATING.isdisjoint(words[max(0, position - 2) : position])
        score += -_BYTE_SCORES[word] if negated else _BYTE_SCORES[word]
    return score


def _star_score(lowered: str) -> int:
    stars = lowered.count(_STAR)
    if not stars:
        found = _STARS.search(lowered)
        stars = int(found[1]) if found else 3
    return 2 * (stars > 3) - 2 * (stars < 3)
