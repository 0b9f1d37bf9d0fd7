"""Operations on register tiles and vectors."""
