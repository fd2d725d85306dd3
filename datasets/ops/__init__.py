"""Operations on data sets: map, filter, pack, mix, split, tokenize."""
